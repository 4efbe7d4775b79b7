"""Writes SentencePiece models byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable

__all__ = ["field", "model", "number", "piece"]


def varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def field(tag: int, content: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return varint(tag << 3 | 2) + varint(len(content)) + content


def number(tag: int, value: int) -> bytes:
    """A field of an integer."""
    return varint(tag << 3) + varint(value)


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    """A piece as SentencePiece writes it."""
    written = field(1, text.encode()) + struct.pack("<Bf", 2 << 3 | 5, score)
    return field(1, written + (number(3, kind) if kind != 1 else b""))


def model(pieces: Iterable[tuple[str, float, int]]) -> bytes:
    """A model of these pieces: text, score, type."""
    return b"".join(piece(*one) for one in pieces)
