"""Reads the header of a safetensors file strictly: it refuses whatever two readers could understand differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NoReturn

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["LONGEST_HEADER", "Header", "HeaderWarning", "read_header"]

LONGEST_HEADER = 100_000_000
"""The most bytes of header that safetensors reads."""

_LENGTH_BYTES = 8  # the header's length stands before it, little-endian
_FIELDS = {"dtype", "shape", "data_offsets"}
_TOO_MANY_BITS = 1 << 64
_PULL_LFS = "this looks like a git-lfs pointer to the file, not the file itself; run 'git lfs pull'"
_LOOK_INSIDE = "this is not a safetensors file, despite its name; look at its first bytes"
_CUT_SHORT = "the download or the copy was cut short; fetch the file again"
_NEWER = "if a newer safetensors wrote this file, look for a newer Bowline; otherwise fetch it again"
_FETCH_AGAIN = "the file is damaged; fetch it again, or save it again with safetensors"
_WRITE_ANEW = "safetensors may load this file, but other readers may see another model; save it again with safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderWarning:
    """A fault that a reader must accept but a person should know; one for each kind, with all its tensors.

    - `misaligned`: the first byte is not at a multiple of the element's size, so the tensor cannot be mapped as it is.
    - `empty-name`: a tensor's name is the empty string.
    - `nul-name`: a tensor's name has a NUL, where a C program would cut it off.
    """

    kind: Literal["misaligned", "empty-name", "nul-name"]
    tensors: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The content of a safetensors header.

    `tensors` are in the order of their bytes, with absolute offsets; the extents fill the file from `data_start` to
    `size` without a gap or an overlap. `metadata` is empty if the file has none.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_start: int
    size: int
    warnings: tuple[HeaderWarning, ...]


def read_header(source: ByteSource) -> Header:
    """Read the header of the safetensors file `source`: 8 bytes and the header itself, and no data.

    Accepts the files that safetensors 0.8 accepts, with the same meaning, except those that other readers understand
    differently. It refuses duplicate names and metadata keys, a header that does not begin with `{`, tensor
    information that is not an object of exactly `dtype`, `shape` and `data_offsets`, a dtype that is not a string, and
    a tensor without elements whose other axes overflow.

    Raises:
        FormatError: the file is not safetensors, or readers could understand it differently.
        CheckpointError: it cannot be read.

    Example:
        >>> from bowline.checkpoint.places.byte_source import MemoryBytes
        >>> text = b'{"wte": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}'
        >>> file = MemoryBytes("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(8))
        >>> read_header(file).tensors["wte"].offset == 8 + len(text)
        True
    """
    text = _header_text(source)
    data_start = _LENGTH_BYTES + len(text)
    entries = loads(text, f"{source.name}: the header", help=_FETCH_AGAIN)
    if not isinstance(entries, dict):  # always true, since it begins with "{"; for the type checker
        _refuse(source, f"the header is {shown(entries)}, expected an object")
    metadata = _metadata(source, entries.pop("__metadata__", None))
    tensors = [_tensor(source, data_start, name, info) for name, info in entries.items()]
    tensors.sort(key=attrgetter("offset", "nbytes"))  # a stable sort: tensors without bytes keep the file's order
    _check_tiling(source, data_start, tensors)
    return Header(
        tensors={tensor.name: tensor for tensor in tensors},
        metadata=metadata,
        data_start=data_start,
        size=source.size,
        warnings=_warnings(source, tensors),
    )


def _header_text(source: ByteSource) -> bytes:
    if source.size < _LENGTH_BYTES:
        _refuse(
            source, f"{source.size} bytes, expected at least {_LENGTH_BYTES} for the length of a safetensors header"
        )
    first = source.read_at(0, _LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if length > LONGEST_HEADER:
        remedy = _PULL_LFS if first == b"version " else _LOOK_INSIDE
        _refuse(source, f"a header of {length} bytes, expected at most {LONGEST_HEADER}", remedy)
    if length > source.size - _LENGTH_BYTES:
        _refuse(source, f"a header of {length} bytes, but only {source.size - _LENGTH_BYTES} follow")
    text = source.read_at(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        seen = f"begins with {text[:8]!r}" if text else "is empty"
        _refuse(source, f"the header {seen}, expected it to begin with '{{'", _WRITE_ANEW if text else _FETCH_AGAIN)
    return text


def _metadata(source: ByteSource, value: object) -> dict[str, str]:
    if value is None:  # absent, or null, which safetensors treats as absent
        return {}
    if not isinstance(value, dict):
        _refuse(source, f"__metadata__ is {shown(value)}, expected an object of strings")
    for key, entry in value.items():
        if type(entry) is not str:
            _refuse(source, f"__metadata__ has {shown(entry)} for {shown(key)}, expected a string")
    return value


def _tensor(source: ByteSource, data_start: int, name: str, info: object) -> StoredTensor:
    """Check one entry of the header: its fields, its numbers, and that its extent has the length of its shape."""
    if type(info) is not dict:
        remedy = _WRITE_ANEW if isinstance(info, list) else _FETCH_AGAIN
        _refuse_tensor(source, name, f"is {shown(info)}, expected an object", remedy)
    if len(info) != 3 or "dtype" not in info or "shape" not in info or "data_offsets" not in info:
        for field in sorted(_FIELDS - info.keys()):
            _refuse_tensor(source, name, f"has no {field}, expected dtype, shape and data_offsets")
        extra = next(field for field in info if field not in _FIELDS)
        _refuse_tensor(
            source, name, f"has the field {shown(extra)}, expected only dtype, shape and data_offsets", _WRITE_ANEW
        )
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]

    if type(dtype) is not str:
        _refuse_tensor(source, name, f"has {shown(dtype)} as dtype, expected a string", _WRITE_ANEW)
    bits = BITS.get(dtype)
    if bits is None:
        _refuse_tensor(source, name, f"has the dtype {shown(dtype)}, expected one that safetensors 0.8 has", _NEWER)

    if type(shape) is not list:
        _refuse_tensor(source, name, f"has the shape {shown(shape)}, expected an array of whole numbers")
    span = bits  # without the empty axes: whether safetensors overflows depends on the place of the zero
    empty = False
    for size in shape:
        if type(size) is not int or size < 0:
            _refuse_tensor(source, name, f"has {shown(size)} in its shape, expected whole numbers from 0")
        if not size:
            empty = True
        elif size > 1:
            span *= size
            if span >= _TOO_MANY_BITS:
                _refuse_tensor(
                    source, name, f"has a shape of {len(shape)} axes that overflows, expected under 2^64 bits"
                )
    if empty:
        span = 0
    if span % 8:
        _refuse_tensor(source, name, f"has {span // bits} elements of {bits} bits, expected a whole number of bytes")

    if type(offsets) is not list or len(offsets) != 2:
        _refuse_tensor(source, name, f"has {shown(offsets)} as data_offsets, expected [begin, end]")
    begin, end = offsets
    if type(begin) is not int or begin < 0 or type(end) is not int or end < 0:
        wrong = begin if type(begin) is not int or begin < 0 else end
        _refuse_tensor(source, name, f"has {shown(wrong)} in data_offsets, expected whole numbers from 0")
    if end - begin != span // 8:
        _refuse_tensor(
            source,
            name,
            f"has the bytes {shown(begin)} to {shown(end)}, expected {span // 8} bytes for its shape in {dtype}",
        )
    return StoredTensor(name, dtype, tuple(shape), source.name, data_start + begin, span // 8)


def _check_tiling(source: ByteSource, data_start: int, tensors: list[StoredTensor]) -> None:
    reached = data_start
    before: StoredTensor | None = None
    for tensor in tensors:
        if tensor.offset != reached:
            gap = "a gap" if tensor.offset > reached else "an overlap"
            after = f"tensor {shown(before.name)} ends" if before else "the data begins"
            _refuse(
                source,
                f"{gap}: {after} at byte {reached} and tensor {shown(tensor.name)} begins at "
                f"{shown(tensor.offset)}, expected each tensor to begin where the previous one ends",
            )
        reached += tensor.nbytes
        before = tensor
    if reached != source.size:
        trouble = "truncated" if reached > source.size else "bytes after the last tensor"
        _refuse(
            source,
            f"{trouble}: {source.size} bytes, but the header describes {reached}",
            _CUT_SHORT if reached > source.size else _FETCH_AGAIN,
        )


def _warnings(source: ByteSource, tensors: list[StoredTensor]) -> tuple[HeaderWarning, ...]:
    sizes = {dtype: max(bits // 8, 1) for dtype, bits in BITS.items()}
    misaligned = [t for t in tensors if t.offset % sizes[t.dtype] and t.nbytes]
    unnamed = [t for t in tensors if not t.name]
    cut = [t for t in tensors if "\0" in t.name]
    found: list[HeaderWarning] = []
    if misaligned:
        first = misaligned[0]
        found.append(
            HeaderWarning(
                kind="misaligned",
                tensors=_names(misaligned),
                message=f"{source.name}: {len(misaligned)} of {len(tensors)} tensors do not begin at a multiple of "
                f"their element's size, first {shown(first.name)} ({first.dtype}) at byte {first.offset}",
            )
        )
    if unnamed:
        found.append(
            HeaderWarning(
                kind="empty-name", tensors=_names(unnamed), message=f"{source.name}: a tensor's name is empty"
            )
        )
    if cut:
        found.append(
            HeaderWarning(
                kind="nul-name",
                tensors=_names(cut),
                message=f"{source.name}: the names of {len(cut)} tensors contain a NUL, first {shown(cut[0].name)}",
            )
        )
    return tuple(found)


def _names(tensors: list[StoredTensor]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)


def _refuse_tensor(source: ByteSource, name: str, seen: str, remedy: str = _FETCH_AGAIN) -> NoReturn:
    _refuse(source, f"tensor {shown(name)} {seen}", remedy)


def _refuse(source: ByteSource, seen: str, remedy: str = _FETCH_AGAIN) -> NoReturn:
    raise FormatError(f"{source.name}: {seen}", help=remedy)
