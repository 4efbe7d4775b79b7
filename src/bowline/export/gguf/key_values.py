"""The bytes of GGUF's keys: texts, numbers and arrays of them (the specification is ggml's docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack
from typing import Any

from bowline.checkpoint.formats.gguf.value_bytes import ARRAY, STRING, array_value
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError

__all__ = ["boolean", "booleans", "key_bytes", "number", "numbers", "octets", "real", "reals", "text", "texts"]

UINT8, UINT32, INT32, FLOAT32, BOOL = 0, 4, 5, 6, 7
LARGEST = 3.4e38
"""About the largest float32."""


def text(value: str) -> bytes:
    """A text in UTF-8."""
    raw = value.encode("utf-8")
    return pack("<IQ", STRING, len(raw)) + raw


def number(value: Any) -> bytes:
    """A count or an id: uint32. Raises `UsageError` if it is not one."""
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise UsageError(f"config.json: {shown(value)}, expected a whole number", help="mend the config")
    return pack("<II", UINT32, value)


def real(value: Any) -> bytes:
    """A float32. Raises `UsageError` if it is not a number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise UsageError(f"config.json: {shown(value)}, expected a finite number", help="mend the config")
    return pack("<If", FLOAT32, value)


def boolean(value: bool) -> bytes:
    """One byte."""
    return pack("<I?", BOOL, value)


def texts(values: Iterable[str]) -> bytes:
    """An array of texts."""
    return array_value(STRING, [value.encode("utf-8") for value in values])


def numbers(values: Sequence[int]) -> bytes:
    """An array of int32."""
    return pack("<IIQ", ARRAY, INT32, len(values)) + pack(f"<{len(values)}i", *values)


def reals(values: Sequence[float]) -> bytes:
    """The scores of tokens, an array of float32. Raises `UsageError` if one is too large, or NaN."""
    for token, value in enumerate(values):
        if not abs(value) < LARGEST:
            raise UsageError(
                f"the token {token} has the score {shown(value)}, which float32 cannot hold as a finite number",
                help="give it a finite score in the tokenizer's file, or fetch the file again",
            )
    return pack("<IIQ", ARRAY, FLOAT32, len(values)) + pack(f"<{len(values)}f", *values)


def booleans(values: Sequence[bool]) -> bytes:
    """An array of truth values, a byte each."""
    return pack("<IIQ", ARRAY, BOOL, len(values)) + bytes(values)


def octets(values: bytes) -> bytes:
    """An array of uint8."""
    return pack("<IIQ", ARRAY, UINT8, len(values)) + values


def key_bytes(key: str, value: bytes) -> bytes:
    """A key with its value, as they stand in the file."""
    raw = key.encode("utf-8")
    return pack("<Q", len(raw)) + raw + value
