"""Writes the fixed parts of a GGUF file: its first bytes, and the list of its tensors with their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct, pack
from typing import Final

from bowline.checkpoint.formats.gguf.ggml_types import GGML_TYPES

__all__ = ["GGUFEntry", "first_bytes", "padding", "tensor_list"]

_START = Struct("<4sIQQ")
_LENGTH = Struct("<Q")
_TYPE_AND_OFFSET = Struct("<IQ")
_NUMBERS: Final[Mapping[str, int]] = {kind.name: number for number, kind in GGML_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFEntry:
    """A tensor of the file: its name, ggml's name of its type, its shape with the rows first, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def first_bytes(version: int, tensors: int, keys: int) -> bytes:
    """The magic, the version, and the numbers of tensors and keys; the keys follow it.

    Example:
        >>> first_bytes(3, 1, 2)[:8]
        b'GGUF\\x03\\x00\\x00\\x00'
    """
    return _START.pack(b"GGUF", version, tensors, keys)


def tensor_list(entries: Iterable[GGUFEntry], alignment: int) -> bytes:
    """What the file says about its tensors: each begins where the one before it ends, aligned."""
    parts: list[bytes] = []
    offset = 0
    for entry in entries:
        name = entry.name.encode()
        axes: Sequence[int] = entry.shape[::-1]
        parts += (_LENGTH.pack(len(name)), name, pack(f"<I{len(axes)}Q", len(axes), *axes))
        parts.append(_TYPE_AND_OFFSET.pack(_NUMBERS[entry.dtype], offset))
        offset += entry.nbytes + padding(entry.nbytes, alignment)
    return b"".join(parts)


def padding(nbytes: int, alignment: int) -> int:
    """The number of zeros after so many bytes.

    Example:
        >>> padding(33, 32), padding(64, 32)
        (31, 0)
    """
    return -nbytes % alignment
