"""A tensor as a view of a storage, as torch saves both: the extent that it covers, checked against the storage."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

__all__ = ["StorageExtent", "View", "gap_strides", "view_of"]

_MOST_BYTES: Final = 1 << 63  # torch counts in an int64
_FETCH_AGAIN: Final = "fetch the file again, or save it again with torch.save"


class StorageExtent(NamedTuple):
    """The place of a storage's bytes in a file."""

    file: str
    start: int
    nbytes: int


class View(NamedTuple):
    """A tensor's place in its storage, in elements; no number is negative, and there is a stride for each axis."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def view_of(
    name: str,
    dtype: str,
    itemsize: int,
    view: View,
    storage: StorageExtent,
    file_size: int,
    help: str = _FETCH_AGAIN,
) -> StoredTensor:
    """The tensor of a storage.

    Raises:
        FormatError: the view is not within the storage, or repeats its bytes beyond the file's size.
    """
    shape, strides, offset = view
    where = f"{storage.file}: tensor {shown(name)}"
    if math.prod(extent for extent in shape if extent) * itemsize >= _MOST_BYTES:
        raise FormatError(f"{where}: shape {list(shape)}, expected fewer than 2^63 bytes", help=help)
    numel = math.prod(shape)
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) if numel else 0
    if (offset + reach) * itemsize > storage.nbytes:
        raise FormatError(
            f"{where}: shape {list(shape)} with strides {list(strides)} from element {offset} reaches to byte "
            f"{(offset + reach) * itemsize}, but its storage has {storage.nbytes} bytes",
            help=help,
        )
    if numel * itemsize > file_size:  # strides of 0 make a terabyte out of 4 bytes
        raise FormatError(
            f"{where}: shape {list(shape)} with strides {list(strides)} repeats its bytes up to {numel * itemsize}, "
            f"expected no more than the file's {file_size}",
            help="call .contiguous() on it before torch.save, or leave it out of the state dict",
        )
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        file=storage.file,
        offset=storage.start + offset * itemsize,
        nbytes=reach * itemsize,
        strides=gap_strides(shape, strides) if numel else None,
    )


def gap_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides, or `None` for the row-major layout; the strides of axes of length 1 do not matter.

    Example:
        >>> gap_strides((2, 3), (3, 1)), gap_strides((2, 3), (1, 2))
        (None, (1, 2))
    """
    row_major: list[int] = []
    step = 1
    for extent in reversed(shape):
        row_major.insert(0, step)
        step *= extent
    meant = tuple(
        plain if extent == 1 else stride for extent, stride, plain in zip(shape, strides, row_major, strict=True)
    )
    return None if meant == tuple(row_major) else meant
