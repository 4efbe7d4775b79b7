"""The places in a tokenizer's JSON files where token ids stand, apart from the vocabulary itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError, UsageError

__all__ = ["REPAIR", "Replace", "settings_with", "token_id", "tokenizer_with"]

REPAIR = "fetch the file again, or save the tokenizer again with transformers"
MOST_IDS = 1 << 24
"""More rows than any embedding table has; a larger id is malformed."""

Replace = Callable[[int, str], int]
"""Takes an id and its place, in words; returns the id to write there."""


def token_id(value: object, place: str) -> int:
    """`value` if it can be a token's id, or a `FormatError` that names `place`."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_IDS:
        return value
    raise FormatError(f"{place}: {shown(value)}, expected a token id from 0 to {MOST_IDS - 1}", help=REPAIR)


def tokenizer_with(content: Mapping[str, Any], replace: Replace) -> dict[str, Any]:
    """The content of `tokenizer.json` with the ids in its post-processor and padding replaced, in a new object."""
    changed = dict(content)
    if content.get("post_processor") is not None:
        changed["post_processor"] = _post_processor(content["post_processor"], replace)
    padding = content.get("padding")
    if isinstance(padding, dict) and "pad_id" in padding:
        place = "tokenizer.json: padding.pad_id"
        changed["padding"] = {**padding, "pad_id": replace(token_id(padding["pad_id"], place), place)}
    return changed


def settings_with(content: Mapping[str, Any], replace: Replace) -> dict[str, Any]:
    """The content of `tokenizer_config.json` with its ids replaced, in a new object.

    The ids are the keys of `added_tokens_decoder` and the values of every `*_token_id`.
    """
    changed: dict[str, Any] = {}
    for key, value in content.items():
        place = f"tokenizer_config.json: {key}"
        if key == "added_tokens_decoder" and isinstance(value, dict):
            value = {str(replace(_written_id(number, place), place)): token for number, token in value.items()}
        elif key.endswith(("_token_id", "_token_ids")):
            if isinstance(value, list):
                value = [replace(token_id(one, place), place) for one in value]
            elif value is not None:
                value = replace(token_id(value, place), place)
        changed[key] = value
    return changed


def _written_id(digits: str, place: str) -> int:
    return token_id(int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else digits, place)


def _post_processor(content: Any, replace: Replace) -> Any:
    place = "tokenizer.json: post_processor"
    if not isinstance(content, dict):
        raise FormatError(f"{place}: {shown(content)}, expected an object", help=REPAIR)
    kind = content.get("type")
    if kind == "Sequence" and isinstance(content.get("processors"), list):
        return {**content, "processors": [_post_processor(one, replace) for one in content["processors"]]}
    if kind in ("BertProcessing", "RobertaProcessing"):
        return content | {key: _token_and_id(content.get(key), f"{place}.{key}", replace) for key in ("sep", "cls")}
    if kind == "TemplateProcessing":
        special = content.get("special_tokens")
        if isinstance(special, dict):
            named = {name: _template_token(token, f"{place}.{name}", replace) for name, token in special.items()}
            return {**content, "special_tokens": named}
    elif kind == "ByteLevel":
        return content
    raise UsageError(
        f"{place}: {shown(kind)}, and Bowline does not know where a post-processor of this kind holds token ids",
        help="use BertProcessing, RobertaProcessing, TemplateProcessing, ByteLevel or a Sequence of them",
    )


def _token_and_id(pair: Any, place: str, replace: Replace) -> list[Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise FormatError(f"{place}: {shown(pair)}, expected a token and its id", help=REPAIR)
    return [pair[0], replace(token_id(pair[1], place), place)]


def _template_token(token: Any, place: str, replace: Replace) -> dict[str, Any]:
    if not isinstance(token, dict) or not isinstance(token.get("ids"), list):
        raise FormatError(f"{place}: {shown(token)}, expected an object with a list of ids", help=REPAIR)
    return {**token, "ids": [replace(token_id(one, place), place) for one in token["ids"]]}
