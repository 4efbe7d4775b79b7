"""Reads the header of a GGUF file strictly: it refuses what ggml refuses, and what two readers understand differently.

The header is read forward in pieces, and no piece is read before the file is known to be long enough. Long texts and
arrays are passed over: their place is kept (`TextAt`, `ArrayAt`), and `text_arrays` reads them on demand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, NoReturn

from bowline.checkpoint.formats.gguf.ggml_types import GGML_TYPES, REMOVED_TYPES
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["ALIGNMENT", "ARCHITECTURE", "ArrayAt", "GGUFHeader", "TextAt", "Value", "read_gguf_header"]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = "general.alignment"
ARCHITECTURE: Final = "general.architecture"
DEFAULT_ALIGNMENT: Final = 32
MOST_KEYS: Final = 1 << 14
MOST_TENSORS: Final = 1 << 16
"""Limits far above any model's: a file has some forty keys, and the largest models have a few thousand tensors."""
MOST_TEXTS: Final = 1 << 24
"""The texts of one array; no vocabulary is near it."""
LONGEST_KEY: Final = (1 << 16) - 1
"""The bytes of a key, by the format's specification."""
LONGEST_NAME: Final = 63
"""The bytes of a tensor's name: ggml refuses a longer one."""
SHORT_TEXT: Final = 1024
"""A text of at most so many bytes is read with the header."""
TEXT_BUDGET: Final = 8 << 20
"""The bytes of all keys and short texts: more keys are refused, and further texts are passed over."""
MOST_AXES: Final = 4
MOST_ELEMENTS: Final = 1 << 63
FIRST_PIECE: Final = 128 << 10
LARGEST_PIECE: Final = 4 << 20

_U32, _U64 = Struct("<I"), Struct("<Q")
_COUNTS = Struct("<QQ")
_ARRAY_HEAD = Struct("<IQ")
STRING, ARRAY, UINT32 = 8, 9, 4
_SCALARS: Final[Mapping[int, tuple[str, Struct]]] = {
    0: ("UINT8", Struct("<B")),
    1: ("INT8", Struct("<b")),
    2: ("UINT16", Struct("<H")),
    3: ("INT16", Struct("<h")),
    UINT32: ("UINT32", _U32),
    5: ("INT32", Struct("<i")),
    6: ("FLOAT32", Struct("<f")),
    7: ("BOOL", Struct("<?")),
    10: ("UINT64", _U64),
    11: ("INT64", Struct("<q")),
    12: ("FLOAT64", Struct("<d")),
}
_AXES: Final = tuple(Struct(f"<{axes}Q") for axes in range(MOST_AXES + 1))
_TYPE_AND_OFFSET: Final = Struct("<IQ")
_SMALLEST_KEY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8

_PULL_LFS = "this looks like a git-lfs pointer to the file, not the file itself; run 'git lfs pull'"
_FETCH_AGAIN = "fetch the file again, or convert the model again"
_CUT_SHORT = "the download or the copy was cut short; fetch the file again"
_NEWER = "if a newer llama.cpp wrote this file, look for a newer Bowline; otherwise fetch it again"
_NO_READER = "ggml, which llama.cpp reads with, refuses such a file too; convert the model again"


class TextAt(NamedTuple):
    """A text that was passed over: where its bytes are."""

    offset: int
    nbytes: int


class ArrayAt(NamedTuple):
    """An array that was passed over: the type and number of its elements, and where they are, lengths included."""

    kind: str
    length: int
    offset: int
    nbytes: int


Value = int | float | bool | str | TextAt | ArrayAt


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """A GGUF file's metadata by key and its tensors by name; shapes have the rows first, as elsewhere in Bowline."""

    file: str
    """The file that holds the metadata: of a model in several parts, the first."""
    version: int
    values: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    alignment: int
    data_start: int
    size: int
    """The bytes of the file."""

    @property
    def architecture(self) -> str | None:
        """The text of `general.architecture`."""
        stated = self.values.get(ARCHITECTURE)
        return stated if isinstance(stated, str) else None

    @property
    def plain_values(self) -> dict[str, int | float | bool | str]:
        """The numbers and the short texts, by key."""
        return {key: value for key, value in self.values.items() if not isinstance(value, TextAt | ArrayAt)}

    def text_array(self, key: str) -> ArrayAt | None:
        """The place of the array of texts under a key; `None` if the file has none there."""
        value = self.values.get(key)
        return value if isinstance(value, ArrayAt) and value.kind == "STRING" else None

    def number(self, key: str) -> int | None:
        """The whole number under a key; `None` if the file has none there."""
        value = self.values.get(key)
        return value if type(value) is int else None


def read_gguf_header(source: ByteSource) -> GGUFHeader:
    """Read the header of the GGUF file `source` (version 2 or 3, little-endian), and no data.

    Accepts what ggml accepts, except names that a reader in C would cut at a NUL, keys and names that are not UTF-8,
    and more than 16,384 keys or 65,536 tensors.

    Raises:
        FormatError: the file is not GGUF, is damaged, or readers could understand it differently.
        CheckpointError: it cannot be read.

    Example:
        >>> from bowline.checkpoint.places.byte_source import MemoryBytes
        >>> key = (20).to_bytes(8, "little") + b"general.architecture" + (8).to_bytes(4, "little")
        >>> counts = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        >>> file = b"GGUF" + (3).to_bytes(4, "little") + counts + key + (5).to_bytes(8, "little") + b"llama"
        >>> read_gguf_header(MemoryBytes("model.gguf", file)).architecture
        'llama'
    """
    cursor = _Cursor(source)
    version = _version(source, cursor)
    tensor_count, key_count = cursor.unpack(_COUNTS, "the number of tensors and keys")
    _check_count(source, cursor, "keys", key_count, MOST_KEYS, _SMALLEST_KEY)
    values = _values(source, cursor, key_count)
    alignment = _alignment(source, values)
    _check_count(source, cursor, "tensors", tensor_count, MOST_TENSORS, _SMALLEST_TENSOR)
    entries = [_entry(source, cursor, number) for number in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment if entries else cursor.at
    return GGUFHeader(
        file=source.name,
        version=version,
        values=values,
        tensors=_tensors(source, entries, data_start, alignment),
        alignment=alignment,
        data_start=data_start,
        size=source.size,
    )


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class _Cursor:
    """A position in the file that moves forward. It reads the file in pieces, after a check of the file's size."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.at = 0
        self._piece = bytearray()
        self._start = 0
        self._next = FIRST_PIECE

    def need(self, nbytes: int, what: str) -> None:
        """Refuse the file if fewer than `nbytes` follow."""
        if nbytes > self.source.size - self.at:
            left = self.source.size - self.at
            _refuse(
                self.source,
                f"{what} at byte {self.at} needs {nbytes} bytes, but only {left} follow",
                _CUT_SHORT,
            )

    def unpack(self, layout: Struct, what: str) -> tuple[int, ...]:
        """The numbers here, and move behind them."""
        begin = self._here(layout.size, what)
        self.at += layout.size
        return layout.unpack_from(self._piece, begin)

    def take(self, nbytes: int, what: str) -> bytes:
        """The next `nbytes`, which the caller has limited, and move behind them."""
        begin = self._here(nbytes, what)
        self.at += nbytes
        return bytes(self._piece[begin : begin + nbytes])

    def skip(self, nbytes: int, what: str) -> None:
        """Move behind the next `nbytes` without reading them."""
        self.need(nbytes, what)
        self.at += nbytes

    def skip_texts(self, count: int, what: str) -> None:
        """Move behind `count` texts, each a length of 8 bytes and so many bytes."""
        while count:
            begin = self._here(8, what)
            passed, end = _pass_over(self._piece, begin, count)
            self.at = self._start + end
            count -= passed
            if self.at > self.source.size:
                _refuse(self.source, f"{what} has a text that ends at byte {self.at}, beyond the file", _CUT_SHORT)

    def _here(self, nbytes: int, what: str) -> int:
        """The position in the piece of the next `nbytes`, which are read if they are not in it."""
        self.need(nbytes, what)
        begin = self.at - self._start
        if begin + nbytes > len(self._piece):
            length = min(max(nbytes, self._next), self.source.size - self.at)
            self._piece, self._start = bytearray(length), self.at
            self.source.read_into(self.at, memoryview(self._piece))
            self._next = min(4 * self._next, LARGEST_PIECE)
            return 0
        return begin


def _pass_over(piece: bytearray, at: int, count: int) -> tuple[int, int]:
    """The number of texts, up to `count`, whose lengths stand in the piece from `at` on, and the end of the last."""
    passed = 0
    if sys.byteorder == "big":
        for passed in range(count):
            if at + 8 > len(piece):
                return passed, at
            at += 8 + int.from_bytes(piece[at : at + 8], "little")
        return passed + 1, at
    view = memoryview(piece)
    words = [view[first : first + (len(view) - first) // 8 * 8].cast("Q") for first in range(8)]
    try:
        for passed in range(count):  # noqa: B007 - the hot loop of a header: a word at any offset, without a call
            at += 8 + words[at & 7][at >> 3]
    except IndexError:  # no whole length stands in the piece any more
        return passed, at
    return passed + 1, at


def _version(source: ByteSource, cursor: _Cursor) -> int:
    magic = cursor.take(min(4, source.size), "the magic")
    if magic != MAGIC:
        remedy = _PULL_LFS if magic == b"vers" else "this is not a GGUF file, despite its name; look at its first bytes"
        _refuse(source, f"begins with {magic!r}, expected {MAGIC!r}", remedy)
    (version,) = cursor.unpack(_U32, "the version")
    if version and not version & 0xFFFF:
        _refuse(
            source,
            f"is big-endian (version {version:#010x}), expected a little-endian file",
            "convert the model again for little-endian machines, or convert the file with gguf's gguf-convert-endian",
        )
    if version not in VERSIONS:
        _refuse(source, f"has version {version}, expected 2 or 3", _NEWER if version > max(VERSIONS) else _NO_READER)
    return version


def _check_count(source: ByteSource, cursor: _Cursor, what: str, count: int, most: int, smallest: int) -> None:
    left = source.size - cursor.at
    if count * smallest > left:
        _refuse(source, f"states {count} {what}, but only {left} bytes follow", _CUT_SHORT)
    if count > most:
        _refuse(source, f"states {count} {what}, expected at most {most}", _FETCH_AGAIN)


def _values(source: ByteSource, cursor: _Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    budget = TEXT_BUDGET
    for number in range(count):
        (length,) = cursor.unpack(_U64, f"the length of key {number}")
        if not 0 < length <= LONGEST_KEY:
            _refuse(source, f"key {number} has {length} bytes, expected 1 to {LONGEST_KEY}", _FETCH_AGAIN)
        budget -= length
        if budget < 0:
            _refuse(source, f"the first {number + 1} keys have more than {TEXT_BUDGET} bytes", _FETCH_AGAIN)
        key = _name(source, cursor.take(length, f"key {number}"), f"key {number}")
        if key in values:
            _refuse(source, f"the key {shown(key)} occurs twice, expected once", _NO_READER)
        what = f"the value of {shown(key)}"
        (kind,) = cursor.unpack(_U32, what)
        if key == ALIGNMENT and kind != UINT32:
            _refuse(
                source,
                f"{ALIGNMENT} has the type {kind}, expected a power of two of the type {UINT32} (UINT32)",
                _NO_READER,
            )
        values[key] = value = _value(source, cursor, kind, what, min(SHORT_TEXT, budget))
        budget -= len(value) if isinstance(value, str) else 0
    return values


def _value(source: ByteSource, cursor: _Cursor, kind: int, what: str, short: int) -> Value:
    if kind == STRING:
        (length,) = cursor.unpack(_U64, what)
        cursor.need(length, what)
        if length <= short:
            return cursor.take(length, what).decode("utf-8", "replace")
        found = TextAt(cursor.at, length)
        cursor.skip(length, what)
        return found
    if kind == ARRAY:
        return _array(source, cursor, what)
    if kind not in _SCALARS:
        _refuse(source, f"{what} has the type {kind}, expected one of the 13 that GGUF has (0 to 12)", _NEWER)
    (number,) = cursor.unpack(_SCALARS[kind][1], what)
    return number


def _array(source: ByteSource, cursor: _Cursor, what: str) -> ArrayAt:
    kind, count = cursor.unpack(_ARRAY_HEAD, what)
    begin = cursor.at
    if kind == ARRAY:
        _refuse(source, f"{what} is an array of arrays, expected an array of numbers or texts", _NO_READER)
    if kind == STRING:
        cursor.need(8 * count, what)  # no text is shorter than its length
        if count > MOST_TEXTS:
            _refuse(source, f"{what} has {count} texts, expected at most {MOST_TEXTS}", _FETCH_AGAIN)
        cursor.skip_texts(count, what)
        return ArrayAt("STRING", count, begin, cursor.at - begin)
    if kind not in _SCALARS:
        _refuse(source, f"{what} is an array of the type {kind}, expected one that GGUF has (0 to 12)", _NEWER)
    name, layout = _SCALARS[kind]
    cursor.skip(count * layout.size, what)
    return ArrayAt(name, count, begin, cursor.at - begin)


def _alignment(source: ByteSource, values: Mapping[str, Value]) -> int:
    alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        _refuse(source, f"{ALIGNMENT} is {shown(alignment)}, expected a power of two", _NO_READER)
    return alignment


def _entry(source: ByteSource, cursor: _Cursor, number: int) -> _Entry:
    """One tensor's name, type, shape and offset, checked as ggml checks them."""
    what = f"tensor {number}"
    (length,) = cursor.unpack(_U64, what)
    if not 0 < length <= LONGEST_NAME:
        _refuse(source, f"the name of {what} has {length} bytes, expected 1 to {LONGEST_NAME}", _NO_READER)
    name = _name(source, cursor.take(length, what), f"the name of {what}")
    what = f"tensor {shown(name)}"
    (axes,) = cursor.unpack(_U32, what)
    if axes > MOST_AXES:
        _refuse(source, f"{what} has {axes} axes, expected at most {MOST_AXES}", _NO_READER)
    inner_first = cursor.unpack(_AXES[axes], what)
    kind, offset = cursor.unpack(_TYPE_AND_OFFSET, what)
    ggml_type = GGML_TYPES.get(kind)
    if ggml_type is None:
        removed = f" ({REMOVED_TYPES[kind]}, which ggml has removed)" if kind in REMOVED_TYPES else ""
        _refuse(source, f"{what} has the type {kind}{removed}, expected one that ggml has", _NEWER)
    elements = 1
    for size in inner_first:
        elements *= max(1, size)
    if elements >= MOST_ELEMENTS:
        _refuse(source, f"{what} has the shape {list(inner_first)}, expected fewer than 2^63 elements", _NO_READER)
    row = inner_first[0] if inner_first else 1
    if row % ggml_type.elements:
        _refuse(
            source,
            f"{what} has rows of {row}, expected a multiple of {ggml_type.elements}, the block of {ggml_type.name}",
            _NO_READER,
        )
    nbytes = 0 if 0 in inner_first else elements // ggml_type.elements * ggml_type.nbytes
    return _Entry(name, ggml_type.name, inner_first[::-1], nbytes, offset)


def _tensors(source: ByteSource, entries: list[_Entry], data_start: int, alignment: int) -> dict[str, StoredTensor]:
    """The tensors by name. Each must begin where the one before it ends, aligned, as ggml requires."""
    tensors: dict[str, StoredTensor] = {}
    expected = 0
    for entry in entries:
        what = f"tensor {shown(entry.name)}"
        if entry.name in tensors:
            _refuse(source, f"two tensors have the name {shown(entry.name)}, expected one", _NO_READER)
        if entry.offset != expected:
            gap = "a gap" if entry.offset > expected else "an overlap"
            _refuse(
                source,
                f"{gap}: {what} begins at byte {entry.offset} of the data, expected {expected}, where the tensor "
                "before it ends",
                _NO_READER,
            )
        begin = data_start + entry.offset
        if begin + entry.nbytes > source.size:
            _refuse(
                source,
                f"truncated: {what} has the bytes {begin} to {begin + entry.nbytes}, but the file has {source.size}",
                _CUT_SHORT,
            )
        tensors[entry.name] = StoredTensor(entry.name, entry.dtype, entry.shape, source.name, begin, entry.nbytes)
        expected += -(-entry.nbytes // alignment) * alignment
    return tensors


def _name(source: ByteSource, raw: bytes, what: str) -> str:
    if 0 in raw:
        _refuse(source, f"{what} contains a NUL, where readers in C would cut it: {raw[:40]!r}", _FETCH_AGAIN)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        _refuse(source, f"{what} is {raw[:40]!r}, expected UTF-8", _FETCH_AGAIN)


def _refuse(source: ByteSource, seen: str, remedy: str) -> NoReturn:
    raise FormatError(f"{source.name}: {seen}", help=remedy) from None
