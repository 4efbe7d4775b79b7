"""The bytes of GGUF's keys: texts, numbers and arrays of them (the specification is ggml's docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack

from bowline.checkpoint.formats.gguf.value_bytes import ARRAY, STRING, array_value

__all__ = ["boolean", "key_bytes", "number", "numbers", "real", "text", "texts"]

UINT32, INT32, FLOAT32, BOOL = 4, 5, 6, 7


def text(value: str) -> bytes:
    """A text in UTF-8."""
    raw = value.encode("utf-8")
    return pack("<IQ", STRING, len(raw)) + raw


def number(value: int) -> bytes:
    """A count or an id: uint32."""
    return pack("<II", UINT32, value)


def real(value: float) -> bytes:
    """A float32."""
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


def key_bytes(key: str, value: bytes) -> bytes:
    """A key with its value, as they stand in the file."""
    raw = key.encode("utf-8")
    return pack("<Q", len(raw)) + raw + value
