"""Byte-level BPE as llama.cpp reads it: the merges, and a name for the way in which text is split into words."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer import StoredTokenizer
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import text, texts
from bowline.export.gguf.token_types import (
    TokenizerKeys,
    TokenType,
    added_type,
    condition_notes,
    is_part,
    listed_tokens,
)

__all__ = ["byte_level_keys"]

WHOLE_WORDS = "llama-bpe"
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
    _check_model(tokenizer)
    split = _split(tokenizer)
    types = {
        token: added_type(tokenizer, token) if token in tokenizer.added else TokenType.NORMAL
        for token in tokenizer.texts
    }
    keys = {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(split),
        **listed_tokens(tokenizer.texts, types, rows),
        "tokenizer.ggml.merges": texts(f"{left} {right}" for left, right in tokenizer.merges),
    }
    return TokenizerKeys(keys=keys, notes=(*_notes(tokenizer, split), *condition_notes(tokenizer)))


def _check_model(tokenizer: StoredTokenizer) -> None:
    """Raise `UsageError` for what llama.cpp has no key for."""
    if not tokenizer.texts:
        raise UsageError("tokenizer.json: model.vocab is empty, expected tokens", help="fetch the file again")
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if tokenizer.model.get(key)]
    if odd:
        raise UsageError(
            f"tokenizer.json: model.{odd[0]} is {shown(tokenizer.model[odd[0]])}, expected none: llama.cpp has no key "
            "for it",
            help=CONVERTER,
        )
    normalizer = tokenizer.content.get("normalizer")
    if normalizer is not None and not is_part(normalizer, "NFC"):
        raise UsageError(
            f"tokenizer.json normalises by {shown(normalizer)}, expected nothing or NFC: llama.cpp does not normalise",
            help=CONVERTER,
        )
    for rank, (left, right) in enumerate(tokenizer.merges):
        if left + right not in tokenizer.ids:
            raise UsageError(
                f"tokenizer.json: model.merges[{rank}] makes {shown(left + right)}, which is no token",
                help="remove the merge, or fetch the file again",
            )
        if " " in left or " " in right:
            raise UsageError(
                f"tokenizer.json: model.merges[{rank}] has a space in {shown(left)} or {shown(right)}, but llama.cpp "
                "separates the two parts by a space",
                help="train the tokenizer with a byte-level alphabet, which spells a space as another character",
            )


def _notes(tokenizer: StoredTokenizer, split: str) -> Iterator[str]:
    whole = tokenizer.model.get("ignore_merges") is True
    if whole and split != WHOLE_WORDS:
        raise UsageError(
            f"tokenizer.json: model.ignore_merges is true, which llama.cpp does for {WHOLE_WORDS} only, not for "
            f"{split}",
            help=CONVERTER,
        )
    if not whole and split == WHOLE_WORDS:
        yield "llama.cpp takes a word that is a token as a whole; tokenizer.json takes it only if merges make it"
    if tokenizer.content.get("normalizer") is not None:
        yield "tokenizer.json composes characters (NFC), llama.cpp does not: text that is not NFC can split otherwise"


def _split(tokenizer: StoredTokenizer) -> str:
    """llama.cpp's name for the way in which text is split into words before the merges."""
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
