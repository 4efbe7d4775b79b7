"""Reads JSON strictly: it refuses whatever two readers could understand differently."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from math import isfinite
from typing import NoReturn

from bowline.errors import FormatError

__all__ = ["DEEPEST", "loads", "shown"]

DEEPEST = 127
"""The deepest nesting of arrays and objects that is read: that of safetensors' own parser."""

_MOST_DIGITS = 640  # no setting of sys.set_int_max_str_digits makes int() refuse so few
_LONG_DIGITS = b"0" * (_MOST_DIGITS + 1)
_DIGITS_ALIKE = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 32 for byte in range(256))
_MOST_SHOWN = 80
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_BRACKETS_OR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_DEPTH_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def shown(value: object) -> str:
    """A value from a file as text for a one-line message: control characters escaped, long texts cut.

    Containers are described by kind and length, so that a hostile file cannot make the message itself expensive.

    Example:
        >>> shown("a\\nb"), shown(None), shown([1, 2]), len(shown("x" * 10**6))
        ("'a\\\\nb'", 'null', 'an array of 2', 106)
    """
    match value:
        case str():
            clip = repr(value[:_MOST_SHOWN])
            return clip if len(value) <= _MOST_SHOWN else f"{clip}... ({len(value)} characters)"
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return f"an object of {len(value)}"
        case list():
            return f"an array of {len(value)}"
        case _:
            digits = repr(value)
            return digits if len(digits) <= _MOST_SHOWN else f"{digits[:_MOST_SHOWN]}... ({len(digits)} characters)"


def loads(
    data: bytes,
    what: str,
    *,
    allow_nonfinite: bool = False,
    help: str = "fetch the file again, or save it again with the tool that made it",
) -> object:
    """Parse `data`, if every JSON reader must read the same value from it.

    Beyond what `json.loads` refuses, this refuses a byte order mark, a duplicate key, a lone surrogate, `NaN` and
    `Infinity`, a number past float64's range, an integer of more than 640 digits, and more than `DEEPEST` levels.
    `-0` is read as a float, as everywhere outside of Python.

    Arguments:
        data: the whole text, UTF-8.
        what: what the text is, with its file, to begin messages with.
        allow_nonfinite: read `NaN`, `Infinity` and `-Infinity`. No JSON has them, but Python writes them, and so some
            published configurations do (`"time_step_limit": [0.0, Infinity]`).
        help: the way out, for messages.

    Raises:
        FormatError: it is not strict JSON.

    Example:
        >>> loads(b'{"vocab_size": 50257}', "config.json")
        {'vocab_size': 50257}
        >>> loads(b'{"vocab_size": 50257, "vocab_size": 50304}', "config.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bowline.errors.FormatError: config.json: the key 'vocab_size' occurs twice in one object, expected once (help...
    """

    def refuse(seen: str) -> NoReturn:
        raise FormatError(f"{what}: {seen}", help=help) from None

    def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    refuse(f"the key {shown(key)} occurs twice in one object, expected once")
                seen.add(key)
        return found

    def integer(digits: str) -> int | float:
        if len(digits) > _MOST_DIGITS:
            refuse(f"an integer of {len(digits)} digits, expected at most {_MOST_DIGITS}")
        return -0.0 if digits == "-0" else int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if not isfinite(value):
            refuse(f"the number {digits[:_MOST_SHOWN]}, expected one within float64's range")
        return value

    def constant(token: str) -> float:
        if not allow_nonfinite:
            refuse(f"{token} is not a JSON value, expected a finite number or null")
        return float(token)

    if data.startswith(b"\xef\xbb\xbf"):
        refuse("begins with a byte order mark, expected JSON from the first byte")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(f"byte {data[error.start]:#04x} at {error.start}: {error.reason}, expected UTF-8 throughout")
    if (depth := _depth(data)) > DEEPEST:
        refuse(f"{depth} levels of nested arrays and objects, expected at most {DEEPEST}")

    plain_integers = b"-0" not in data and _LONG_DIGITS not in data.translate(_DIGITS_ALIKE)  # int() by itself will do
    decoder = json.JSONDecoder(
        object_pairs_hook=unique_keys,
        parse_int=None if plain_integers else integer,
        parse_float=number,
        parse_constant=constant,
    )
    try:
        value: object = decoder.decode(text)
    except json.JSONDecodeError as error:
        refuse(f"not JSON at character {error.pos} ({error.msg}), expected one JSON value and nothing after it")

    if _SURROGATE_ESCAPE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(f"a string contains the lone surrogate {error.object[error.start]!r}, expected Unicode text")
    return value


def _depth(data: bytes) -> int:
    """The nesting depth of a JSON text, counted without recursion, so that a deep text cannot exhaust the stack.

    Exact for JSON deeper than three, and never too small for the part of a malformed text that a parser reads before
    it stops.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    bare = unescaped.translate(None, _NO_BRACKETS_OR_QUOTES).replace(b'""', b"")  # most strings hold no bracket
    outside_strings = b"".join(bare.split(b'"')[::2])
    if not outside_strings.replace(b"[]", b"").replace(b"{}", b"").replace(b"{}", b""):  # a safetensors header
        return 3
    return max(accumulate(map(_DEPTH_STEP.__getitem__, outside_strings)), default=0)
