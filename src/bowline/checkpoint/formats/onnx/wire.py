"""Reads the fields of a protobuf message by ranges: it passes over what nobody asks for, and copies nothing large.

The wire format is a list of fields: a number and a wire type in one varint, and then a varint, 4 bytes, 8 bytes, or a
length and so many bytes. Groups, which proto2 once had, are refused: ONNX has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, NoReturn

from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["CUT_SHORT", "FETCH_AGAIN", "BYTES", "FIXED32", "FIXED64", "VARINT", "Field", "Wire", "as_signed"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_FIELDS: Final = 1 << 22
"""The fields of all messages that are entered: graphs of tens of thousands of nodes have less than a million."""
LARGEST_NUMBER: Final = (1 << 29) - 1
LONGEST_VARINT: Final = 10
FIRST_PIECE: Final = 4 << 10
LARGEST_PIECE: Final = 256 << 10

CUT_SHORT = "the download or the copy was cut short; fetch the file again"
FETCH_AGAIN = "fetch the file again, or export the model again"
_PULL_LFS = "this looks like a git-lfs pointer to the file, not the file itself; run 'git lfs pull'"


class Field(NamedTuple):
    """One field of a message: its number, its wire type, and its value or the place of its bytes."""

    number: int
    kind: int
    value: int
    """The number of a varint; of every other wire type, the position of the first byte."""
    length: int
    """The bytes from that position; 0 for a varint."""


class Wire:
    """The fields of the messages in one file, which is read in pieces."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self._piece = b""
        self._start = 0
        self._next = FIRST_PIECE
        self._left = MOST_FIELDS

    def fields(self, start: int, end: int, what: str) -> Iterator[Field]:
        """The fields of the message that fills the bytes from `start` to `end`; `what` names it in errors.

        Raises:
            FormatError: a field does not end within the message, or is none.
        """
        at = start
        while at < end:
            self._left -= 1
            if self._left < 0:
                self.refuse(f"has more than {MOST_FIELDS} fields", FETCH_AGAIN)
            key, at = self._varint(at, end, what)
            number, kind = key >> 3, key & 7
            if not 0 < number <= LARGEST_NUMBER:
                self.refuse(f"{what} has a field with the number {number} at byte {at}", self._remedy())
            if kind == BYTES:
                length, at = self._varint(at, end, what)
                if length > end - at:
                    self.refuse(
                        f"{what} has {end - at} bytes left at byte {at}, but its field {number} states {length}",
                        CUT_SHORT,
                    )
                yield Field(number, kind, at, length)
                at += length
            elif kind == VARINT:
                value, at = self._varint(at, end, what)
                yield Field(number, kind, value, 0)
            elif kind in (FIXED32, FIXED64):
                length = 4 if kind == FIXED32 else 8
                if length > end - at:
                    self.refuse(f"{what} ends at byte {end}, within its field {number}", CUT_SHORT)
                yield Field(number, kind, at, length)
                at += length
            else:
                self.refuse(
                    f"{what} has a field of the wire type {kind} at byte {at}, which ONNX lacks", self._remedy()
                )

    def varints(self, start: int, end: int, most: int, what: str) -> list[int]:
        """The packed varints that fill the bytes from `start` to `end`: at most `most` of them."""
        values: list[int] = []
        at = start
        while at < end:
            if len(values) == most:
                self.refuse(f"{what} has more than {most} numbers", FETCH_AGAIN)
            value, at = self._varint(at, end, what)
            values.append(value)
        return values

    def take(self, start: int, length: int) -> bytes:
        """The bytes of a field, whose length the caller has limited."""
        begin = self._here(start, length)
        return self._piece[begin : begin + length]

    def _varint(self, at: int, end: int, what: str) -> tuple[int, int]:
        """The varint at `at`, and the position behind it."""
        begin = at - self._start
        if at >= end:
            self.refuse(f"{what} ends at byte {end}, within a number", CUT_SHORT)
        if not 0 <= begin < len(self._piece):
            begin = self._here(at, 1)
        value = self._piece[begin]
        if value < 0x80:  # most are
            return value, at + 1
        length = min(LONGEST_VARINT, end - at)
        begin = self._here(at, length)
        value = 0
        for index in range(length):
            octet = self._piece[begin + index]
            value |= (octet & 0x7F) << (7 * index)
            if octet < 0x80:
                if value >= 1 << 64:
                    break
                return value, at + index + 1
        if length < LONGEST_VARINT:
            self.refuse(f"{what} ends at byte {end}, within a number", CUT_SHORT)
        raise self._error(f"{what} has a number of more than 64 bits at byte {at}", self._remedy())

    def _here(self, at: int, length: int) -> int:
        """The position in the piece of `length` bytes at `at`, which are read if they are not in it."""
        begin = at - self._start
        if begin < 0 or begin + length > len(self._piece):
            follows = 0 <= begin <= len(self._piece)
            self._next = min(4 * self._next, LARGEST_PIECE) if follows else FIRST_PIECE
            self._piece = self.source.read_at(at, min(max(length, self._next), self.source.size - at))
            self._start = at
            return 0
        return begin

    def refuse(self, seen: str, remedy: str) -> NoReturn:
        """Raise the `FormatError` about this file."""
        raise self._error(seen, remedy) from None

    def _error(self, seen: str, remedy: str) -> FormatError:
        return FormatError(f"{self.source.name}: {seen}", help=remedy)

    def _remedy(self) -> str:
        """The way out for a file that is no protobuf at all, or is damaged."""
        if self.source.size >= 8 and self.source.read_at(0, 8) == b"version ":
            return _PULL_LFS
        return FETCH_AGAIN


def as_signed(value: int) -> int:
    """A varint as the int64 that it stands for.

    Example:
        >>> as_signed(2**64 - 1)
        -1
    """
    return value - (1 << 64) if value >= 1 << 63 else value
