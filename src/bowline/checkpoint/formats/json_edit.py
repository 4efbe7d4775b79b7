"""Sets values in a JSON text and changes nothing else, not even a space or the spelling of a number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from bowline.errors import ConfigError

__all__ = ["set_values"]

_DECODER = json.JSONDecoder()
_SPACE = " \t\n\r"


def set_values(text: str, values: Mapping[str, Any] | Mapping[tuple[str, ...], Any], file: str = "config.json") -> str:
    """The text with each key set to its value; an absent key becomes the first of its object.

    A key is dotted, or a tuple of the keys that lead to it. `file` is the text's name in errors.

    Raises `ConfigError` when an object on the path does not exist.

    Example:
        >>> set_values('{"a": 1e-5, "b": {"tie": false}}', {"b.tie": True})
        '{"a": 1e-5, "b": {"tie": true}}'
    """
    wanted: dict[tuple[str, ...], dict[str, str]] = {}
    nested: dict[tuple[str, ...], dict[str, None]] = {}
    for path, value in values.items():
        *outer, last = path.split(".") if isinstance(path, str) else path
        wanted.setdefault(tuple(outer), {})[last] = json.dumps(value, ensure_ascii=False)
        for depth, key in enumerate(outer):
            nested.setdefault(tuple(outer[:depth]), {})[key] = None

    def edits(start: int, place: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
        """Yield the replacements in the object at `start`, found in one pass for all values."""
        if start >= len(text) or text[start] != "{":
            raise ConfigError(f"{file}: {'.'.join(place) or 'the file'} is not an object")
        spans = dict(_members(text, start))
        here = wanted.get(place, {})
        absent = [f"{json.dumps(key)}: {value}" for key, value in here.items() if key not in spans]
        if absent:
            yield _insertion(text, start, absent, empty=not spans)
        for key, value in here.items():
            if key in spans:
                yield *spans[key], value
        for key in nested.get(place, {}):
            if key in here:
                raise ConfigError(f"{file}: {'.'.join((*place, key))} is not an object")
            if key not in spans:
                raise ConfigError(f"{file}: {'.'.join((*place, key))} is missing")
            yield from edits(spans[key][0], (*place, key))

    parts: list[str] = []
    at = 0
    for begin, end, replacement in sorted(edits(_skip(text, 0), ())) if values else ():
        parts += text[at:begin], replacement
        at = end
    return "".join([*parts, text[at:]])


def _members(text: str, start: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each key of the object at `start` with the span of its value."""
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, True)
        begin = _skip(text, _skip(text, at) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, begin)
        yield key, (begin, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _insertion(text: str, start: int, members: list[str], *, empty: bool) -> tuple[int, int, str]:
    """The edit that puts new members first in the object at `start`, with the spacing of its own members."""
    after = start + 1
    if empty:
        return after, after, ", ".join(members)
    space = text[after : _skip(text, after)]
    between = "," + (space or " ")
    return after, after + len(space), space + between.join(members) + between


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
