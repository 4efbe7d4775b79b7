"""A tokenizer as llama.cpp reads it: the tokens by id with their types, the merges, and the special ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer import Kind, StoredTokenizer, read_tokenizer
from bowline.edit.tokenizer.stored_tokenizer import read_json_object
from bowline.errors import UsageError
from bowline.export.gguf.key_values import boolean, number, numbers, text, texts

__all__ = ["tokenizer_keys"]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's types of tokens."""
SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}
NUMERALS, NUMERAL_TRIPLES = r"\p{N}", r"\p{N}{1,3}"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    "{numerals}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WAY_OUT = "convert the model with llama.cpp's own convert_hf_to_gguf.py"


def tokenizer_keys(files: FileSet, config: Mapping[str, Any], rows: int) -> dict[str, bytes]:
    """The keys `tokenizer.*` for a table of `rows` rows.

    Raises:
        UsageError: there is no `tokenizer.json`, it is not byte-level BPE, or llama.cpp has no name for the way in
            which it splits text.
        FormatError: it is malformed.
    """
    tokenizer = read_tokenizer(files)
    if tokenizer.kind is not Kind.BYTE_LEVEL_BPE:
        raise UsageError(f"tokenizer.json is {tokenizer.kind}, expected byte-level BPE", help=WAY_OUT)
    if tokenizer.size > rows:
        raise UsageError(
            f"the tokenizer has ids up to {tokenizer.size - 1}, but the table has only {rows} rows",
            help="`bowline audit` says which tokens have no row",
        )
    listed, kinds = [], []
    for token in range(rows):
        found = tokenizer.texts.get(token)
        listed.append(f"[PAD{token}]" if found is None else found)
        kinds.append(UNUSED if found is None else _kind(tokenizer, token, found))
    keys = {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(_split(tokenizer)),
        "tokenizer.ggml.tokens": texts(listed),
        "tokenizer.ggml.token_type": numbers(kinds),
        "tokenizer.ggml.merges": texts(f"{left} {right}" for left, right in tokenizer.merges),
    }
    settings = read_json_object(files, "tokenizer_config.json")
    keys |= _special(tokenizer, config, settings)
    keys["tokenizer.ggml.add_bos_token"] = boolean(_adds_first(tokenizer, settings))
    template = _template(files, settings)
    return keys if template is None else {**keys, "tokenizer.chat_template": text(template)}


def _kind(tokenizer: StoredTokenizer, token: int, found: str) -> int:
    if token not in tokenizer.added:
        return NORMAL
    looks_special = found.startswith("<|") and found.endswith("|>")
    return CONTROL if tokenizer.added[token] or looks_special else USER_DEFINED


def _split(tokenizer: StoredTokenizer) -> str:
    """llama.cpp's name for what cuts a text into words before the merges."""
    content = tokenizer.content.get("pre_tokenizer")
    parts = content.get("pretokenizers") if _is(content, "Sequence") else [content]
    parts = parts if isinstance(parts, list) else []
    last = parts[-1] if parts else None
    if _is(last, "ByteLevel") and not last.get("add_prefix_space"):
        by_regex = last.get("use_regex", True)
        if len(parts) == 1 and by_regex:
            return "gpt-2"
        if len(parts) == 2 and by_regex and _is(parts[0], "Digits") and parts[0].get("individual_digits"):
            return "smollm"
        if len(parts) == 2 and not by_regex and _is(parts[0], "Split") and not parts[0].get("invert"):
            pattern = parts[0].get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            for name, numerals in (("llama-bpe", NUMERAL_TRIPLES), ("qwen2", NUMERALS)):
                if regex == LLAMA_3.replace("{numerals}", numerals) and parts[0].get("behavior") == "Isolated":
                    return name
    raise UsageError(f"tokenizer.json splits text by {shown(content)}, for which no name is known here", help=WAY_OUT)


def _special(tokenizer: StoredTokenizer, config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, bytes]:
    """The special ids: the tokens that the tokenizer's settings name, else the config's ids."""
    found: dict[str, bytes] = {}
    for key, name in SPECIAL.items():
        stated = settings.get(key.removesuffix("_id"))
        token = stated.get("content") if isinstance(stated, dict) else stated
        number_of: Any = tokenizer.ids.get(token) if isinstance(token, str) else None
        if number_of is None:
            listed = config.get(key)
            number_of = listed[0] if isinstance(listed, list) and listed else listed
        if type(number_of) is int and number_of in tokenizer.texts:
            found[f"tokenizer.ggml.{name}"] = number(number_of)
    return found


def _adds_first(tokenizer: StoredTokenizer, settings: Mapping[str, Any]) -> bool:
    """Whether a text gets a first token in front: what the settings say, else what the template does."""
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    content = tokenizer.content.get("post_processor")
    steps = content.get("processors") if _is(content, "Sequence") else [content]
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if _is(step, "TemplateProcessing") else None
        if isinstance(single, list) and single and isinstance(single[0], dict):
            return "SpecialToken" in single[0]
    return False


def _template(files: FileSet, settings: Mapping[str, Any]) -> str | None:
    if files.has("chat_template.jinja"):
        return files.read("chat_template.jinja").decode("utf-8", errors="strict")
    stated = settings.get("chat_template")
    return stated if isinstance(stated, str) else None


def _is(content: Any, kind: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(content, dict) and content.get("type") == kind
