"""A tokenizer as llama.cpp reads it: the tokens by id with their types, what splits a text, and the special ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer import Kind, StoredTokenizer, read_tokenizer
from bowline.edit.tokenizer.stored_tokenizer import read_json_object
from bowline.errors import FormatError, UsageError
from bowline.export.gguf.byte_level_tokens import byte_level_keys
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import boolean, number, text
from bowline.export.gguf.sentencepiece_tokens import merged_pieces_keys
from bowline.export.gguf.slow_tokenizer import slow_tokenizer
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
        UsageError: there is neither `tokenizer.json` nor SentencePiece's model, it is of a kind that is not written, or
            llama.cpp would split text in another way.
        FormatError: it is malformed.
    """
    settings = read_json_object(files, "tokenizer_config.json")
    slow = None if files.has("tokenizer.json") else slow_tokenizer(files, rows)
    ids: Mapping[str, int]
    if slow is not None:
        _check_size(max(slow.texts, default=-1) + 1, rows)
        found, ids, adds = slow.keys(rows), slow.ids, slow.adds
    else:
        tokenizer = read_tokenizer(files)
        if tokenizer.kind not in BY_KIND:
            wanted = ", ".join(BY_KIND)
            raise UsageError(f"tokenizer.json is {tokenizer.kind}, expected one of {wanted}", help=CONVERTER)
        _check_size(tokenizer.size, rows)
        found, ids, adds = BY_KIND[tokenizer.kind](tokenizer, rows), tokenizer.ids, _template_adds(tokenizer)
    said = [settings.get(key) for key in ("add_bos_token", "add_eos_token")]
    first, last = (one if isinstance(one, bool) else other for one, other in zip(said, adds, strict=True))
    keys = {
        **_special(ids, config, settings),
        **found.keys,
        "tokenizer.ggml.add_bos_token": boolean(first),
        "tokenizer.ggml.add_eos_token": boolean(last),
    }
    template = _template(files, settings)
    return TokenizerKeys(
        keys=keys if template is None else {**keys, "tokenizer.chat_template": text(template)}, notes=found.notes
    )


def _check_size(size: int, rows: int) -> None:
    if size > rows:
        raise UsageError(
            f"the tokenizer has ids up to {size - 1}, but the table has only {rows} rows",
            help="`bowline audit` says which tokens have no row",
        )


def _special(ids: Mapping[str, int], config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, bytes]:
    """The special ids: the tokens that the tokenizer's settings name, else the config's ids."""
    found: dict[str, bytes] = {}
    known = set(ids.values())
    for key, name in SPECIAL.items():
        stated = settings.get(key.removesuffix("_id"))
        token = stated.get("content") if isinstance(stated, dict) else stated
        number_of: Any = ids.get(token) if isinstance(token, str) else None
        if number_of is None:
            listed = config.get(key)
            number_of = listed[0] if isinstance(listed, list) and listed else listed
        if type(number_of) is int and number_of in known:
            found[f"tokenizer.ggml.{name}"] = number(number_of)
    return found


def _template_adds(tokenizer: StoredTokenizer) -> tuple[bool, bool]:
    """Whether the template of `tokenizer.json` puts a token in front of a text, and one behind."""
    first = last = False
    content = tokenizer.content.get("post_processor")
    steps = content.get("processors") if is_part(content, "Sequence") else [content]
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if is_part(step, "TemplateProcessing") else None
        if isinstance(single, list) and single and all(isinstance(one, dict) for one in single):
            first, last = "SpecialToken" in single[0], "SpecialToken" in single[-1]
    return first, last


def _template(files: FileSet, settings: Mapping[str, Any]) -> str | None:
    if files.has("chat_template.jinja"):
        try:
            return files.read("chat_template.jinja").decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(
                f"chat_template.jinja: {error.reason} at byte {error.start}, expected UTF-8",
                help="fetch the file again",
            ) from None
    stated = settings.get("chat_template")
    if isinstance(stated, list):  # templates by name
        defaults = [one for one in stated if isinstance(one, dict) and one.get("name") == "default"]
        stated = defaults[0].get("template") if defaults else None
    return stated if isinstance(stated, str) else None
