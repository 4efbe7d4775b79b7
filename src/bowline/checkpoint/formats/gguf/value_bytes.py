"""The values of a GGUF file's keys as bytes: where they are in the file, and copies with other items or numbers.

A value is its type in 4 bytes and what follows; of an array that is the type of its items, their number, and the items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from bowline.checkpoint.formats.gguf.header import ArrayAt, GGUFHeader, TextAt
from bowline.checkpoint.places.byte_source import ByteSource

__all__ = ["KeyExtent", "array_items", "array_value", "key_extents", "value_numbers", "with_numbers"]

STRING: Final = 8
ARRAY: Final = 9
FIRST_KEY: Final = 24
"""The byte after the magic, the version and the two counts."""
_KIND, _LENGTH = Struct("<I"), Struct("<Q")
_ARRAY_HEAD = Struct("<IIQ")
_NUMBERS: Final[Mapping[int, Struct]] = {
    kind: Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""By the type's number in the file, all but texts and arrays."""


class KeyExtent(NamedTuple):
    """Where a key with its value begins in the file, where its value begins, and where both end."""

    start: int
    value: int
    stop: int


def key_extents(source: ByteSource, header: GGUFHeader) -> dict[str, KeyExtent]:
    """The place of each key in the file `source`, whose header `read_gguf_header` returned; in the file's order."""
    found: dict[str, KeyExtent] = {}
    at = FIRST_KEY
    for key, value in header.values.items():
        start, begin = at, at + _LENGTH.size + len(key.encode())
        (kind,) = _KIND.unpack(source.read_at(begin, _KIND.size))
        if isinstance(value, TextAt | ArrayAt):
            at = value.offset + value.nbytes
        elif kind == STRING:
            (length,) = _LENGTH.unpack(source.read_at(begin + _KIND.size, _LENGTH.size))
            at = begin + _KIND.size + _LENGTH.size + length
        else:
            at = begin + _KIND.size + _NUMBERS[kind].size
        found[key] = KeyExtent(start, begin, at)
    return found


def array_items(value: bytes) -> tuple[int, list[bytes]]:
    """The type of an array's items, and the bytes of each; texts without their lengths.

    Example:
        >>> array_items(array_value(4, [b"\\1\\0\\0\\0", b"\\2\\0\\0\\0"]))
        (4, [b'\\x01\\x00\\x00\\x00', b'\\x02\\x00\\x00\\x00'])
    """
    _, kind, count = _ARRAY_HEAD.unpack_from(value)
    at = _ARRAY_HEAD.size
    if kind != STRING:
        width = _NUMBERS[kind].size
        return kind, [value[begin : begin + width] for begin in range(at, at + count * width, width)]
    items = []
    for _ in range(count):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(value, at)[0]
        items.append(value[begin:at])
    return kind, items


def array_value(kind: int, items: Sequence[bytes]) -> bytes:
    """The value of an array whose items are of this type."""
    head = _ARRAY_HEAD.pack(ARRAY, kind, len(items))
    if kind != STRING:
        return head + b"".join(items)
    return head + b"".join(part for item in items for part in (_LENGTH.pack(len(item)), item))


def value_numbers(value: bytes) -> list[int | float]:
    """The numbers of an array, or the one of a scalar; none for texts."""
    (kind,) = _KIND.unpack_from(value)
    if kind in _NUMBERS:
        return [_NUMBERS[kind].unpack_from(value, _KIND.size)[0]]
    if kind != ARRAY:
        return []
    _, item, count = _ARRAY_HEAD.unpack_from(value)
    if item not in _NUMBERS:
        return []
    end = _ARRAY_HEAD.size + count * _NUMBERS[item].size
    return [number for (number,) in _NUMBERS[item].iter_unpack(value[_ARRAY_HEAD.size : end])]


def with_numbers(value: bytes, replace: Callable[[int | float], int | float]) -> bytes:
    """The value with each of its numbers replaced, in the same type; texts stay.

    Example:
        >>> value = array_value(4, [b"\\1\\0\\0\\0", b"\\2\\0\\0\\0"])
        >>> value_numbers(with_numbers(value, lambda number: number + 7))
        [8, 9]
    """
    (kind,) = _KIND.unpack_from(value)
    if kind in _NUMBERS:
        return value[: _KIND.size] + _NUMBERS[kind].pack(replace(_NUMBERS[kind].unpack_from(value, _KIND.size)[0]))
    numbers = value_numbers(value)
    if not numbers:
        return value
    _, item, _ = _ARRAY_HEAD.unpack_from(value)
    return value[: _ARRAY_HEAD.size] + b"".join(_NUMBERS[item].pack(replace(number)) for number in numbers)
