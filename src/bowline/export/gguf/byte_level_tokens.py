"""Byte-level BPE as llama.cpp reads it: the merges, and the name of what cuts a text into words."""

from __future__ import annotations

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer import StoredTokenizer
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import text, texts
from bowline.export.gguf.token_types import TokenizerKeys, TokenType, added_type, is_part, listed_tokens

__all__ = ["byte_level_keys"]

NUMERALS, NUMERAL_TRIPLES = r"\p{N}", r"\p{N}{1,3}"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    "{numerals}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_keys(tokenizer: StoredTokenizer, rows: int) -> TokenizerKeys:
    """The keys of a byte-level BPE.

    Raises:
        UsageError: llama.cpp has no name for the way in which it splits text.
    """
    types = {
        token: added_type(tokenizer, token) if token in tokenizer.added else TokenType.NORMAL
        for token in tokenizer.texts
    }
    keys = {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(_split(tokenizer)),
        **listed_tokens(tokenizer.texts, types, rows),
        "tokenizer.ggml.merges": texts(f"{left} {right}" for left, right in tokenizer.merges),
    }
    return TokenizerKeys(keys=keys)


def _split(tokenizer: StoredTokenizer) -> str:
    """llama.cpp's name for what cuts a text into words before the merges."""
    content = tokenizer.content.get("pre_tokenizer")
    parts = content.get("pretokenizers") if is_part(content, "Sequence") else [content]
    parts = parts if isinstance(parts, list) else []
    last = parts[-1] if parts else None
    if is_part(last, "ByteLevel") and not last.get("add_prefix_space"):
        by_regex = last.get("use_regex", True)
        if len(parts) == 1 and by_regex:
            return "gpt-2"
        if len(parts) == 2 and by_regex and is_part(parts[0], "Digits") and parts[0].get("individual_digits"):
            return "smollm"
        if len(parts) == 2 and not by_regex and is_part(parts[0], "Split") and not parts[0].get("invert"):
            pattern = parts[0].get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            for name, numerals in (("llama-bpe", NUMERAL_TRIPLES), ("qwen2", NUMERALS)):
                if regex == LLAMA_3.replace("{numerals}", numerals) and parts[0].get("behavior") == "Isolated":
                    return name
    raise UsageError(f"tokenizer.json splits text by {shown(content)}, for which no name is known here", help=CONVERTER)
