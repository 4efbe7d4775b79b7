"""Setting flags in a JSON text without touching anything else in it: not a space, not a number's spelling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]

from bowline.errors import ConfigError

__all__ = ["set_flags"]

_DECODER = json.JSONDecoder()
_SPACE = " \t\n\r"


def set_flags(text: str, flags: Mapping[str, bool]) -> str:
    """The same text with each dotted key set to its value; a key that is absent is put first in its object.

    Raises `ConfigError` when an object on the way does not exist.

    Example:
        >>> set_flags('{"a": 1e-5, "b": {"tie": false}}', {"b.tie": True})
        '{"a": 1e-5, "b": {"tie": true}}'
    """
    for path, value in flags.items():
        text = _set(text, path.split("."), "true" if value else "false")
    return text


def _set(text: str, keys: list[str], value: str) -> str:
    start = _skip(text, 0)
    for depth, key in enumerate(keys):
        if start >= len(text) or text[start] != "{":
            raise ConfigError(f"config.json: {'.'.join(keys[:depth]) or 'the file'} is not an object")
        spans = dict(_members(text, start))
        last = depth == len(keys) - 1
        if key in spans:
            begin, end = spans[key]
            if last:
                return text[:begin] + value + text[end:]
            start = begin
        elif last:
            return _insert(text, start, key, value, empty=not spans)
        else:
            raise ConfigError(f"config.json: there is no {'.'.join(keys[: depth + 1])}")
    return text


def _members(text: str, start: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each key of the object at `start`, with the span of its value."""
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, True)
        begin = _skip(text, _skip(text, at) + 1)  # over the colon
        _, end = _DECODER.raw_decode(text, begin)
        yield key, (begin, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _insert(text: str, start: int, key: str, value: str, *, empty: bool) -> str:
    after = start + 1
    space = text[after : _skip(text, after)]
    member = f"{json.dumps(key)}: {value}"
    if empty:
        return text[:after] + member + text[after:]
    return text[:after] + space + member + "," + (space or " ") + text[after + len(space) :]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
