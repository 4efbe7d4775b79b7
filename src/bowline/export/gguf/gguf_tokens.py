"""A tokenizer as llama.cpp reads it: the tokens by id with their types, what splits a text, and the special ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer import Kind, StoredTokenizer, read_tokenizer
from bowline.edit.tokenizer.stored_tokenizer import read_json_object
from bowline.errors import UsageError
from bowline.export.gguf.byte_level_tokens import byte_level_keys
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import boolean, number, text
from bowline.export.gguf.sentencepiece_tokens import merged_pieces_keys
from bowline.export.gguf.token_types import TokenizerKeys, is_part
from bowline.export.gguf.unigram_tokens import unigram_keys

__all__ = ["tokenizer_keys"]

SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}
BY_KIND = {
    Kind.BYTE_LEVEL_BPE: byte_level_keys,
    Kind.BYTE_FALLBACK_BPE: merged_pieces_keys,
    Kind.UNIGRAM: unigram_keys,
}


def tokenizer_keys(files: FileSet, config: Mapping[str, Any], rows: int) -> TokenizerKeys:
    """The keys `tokenizer.*` for a table of `rows` rows.

    Raises:
        UsageError: there is no `tokenizer.json`, it is of a kind that is not written, or llama.cpp would split text in
            another way.
        FormatError: it is malformed.
    """
    tokenizer = read_tokenizer(files)
    if tokenizer.kind not in BY_KIND:
        wanted = ", ".join(BY_KIND)
        raise UsageError(f"tokenizer.json is {tokenizer.kind}, expected one of {wanted}", help=CONVERTER)
    if tokenizer.size > rows:
        raise UsageError(
            f"the tokenizer has ids up to {tokenizer.size - 1}, but the table has only {rows} rows",
            help="`bowline audit` says which tokens have no row",
        )
    found = BY_KIND[tokenizer.kind](tokenizer, rows)
    settings = read_json_object(files, "tokenizer_config.json")
    first, last = _adds(tokenizer, settings)
    keys = {
        **_special(tokenizer, config, settings),
        **found.keys,
        "tokenizer.ggml.add_bos_token": boolean(first),
        "tokenizer.ggml.add_eos_token": boolean(last),
    }
    template = _template(files, settings)
    return TokenizerKeys(
        keys=keys if template is None else {**keys, "tokenizer.chat_template": text(template)}, notes=found.notes
    )


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


def _adds(tokenizer: StoredTokenizer, settings: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a text gets a token in front, and one behind: what the settings say, else what the template does."""
    first = last = False
    content = tokenizer.content.get("post_processor")
    steps = content.get("processors") if is_part(content, "Sequence") else [content]
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if is_part(step, "TemplateProcessing") else None
        if isinstance(single, list) and single and all(isinstance(one, dict) for one in single):
            first, last = "SpecialToken" in single[0], "SpecialToken" in single[-1]
    said = [settings.get(key) for key in ("add_bos_token", "add_eos_token")]
    return (
        said[0] if isinstance(said[0], bool) else first,
        said[1] if isinstance(said[1], bool) else last,
    )


def _template(files: FileSet, settings: Mapping[str, Any]) -> str | None:
    if files.has("chat_template.jinja"):
        return files.read("chat_template.jinja").decode("utf-8", errors="strict")
    stated = settings.get("chat_template")
    return stated if isinstance(stated, str) else None
