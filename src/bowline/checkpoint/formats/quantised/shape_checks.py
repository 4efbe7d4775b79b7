"""Checks that the tensors of a quantised weight fit each other, and the arithmetic that several layouts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from bowline.checkpoint.formats.quantised.quantised_weight import (
    MOST_COLUMNS,
    MOST_ROWS,
    TOO_LARGE,
    DequantisedRows,
    Parts,
)
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

__all__ = [
    "FLOATS",
    "ROUNDING",
    "check_dtype",
    "check_extent",
    "check_shape",
    "group_size",
    "groups_in_words",
    "number_in",
    "transposed_rows",
    "two_axes",
    "unpack_columns",
    "unpack_words",
]

FLOATS = ("F32", "F16", "BF16")
ROUNDING = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8, "F8_E8M0": 0.5}
"""The largest relative error of a number that is rounded to a dtype (an E8M0 scale is a power of two)."""


def check_dtype(tensor: StoredTensor, *dtypes: str) -> None:
    """Raise `FormatError` for a tensor of another dtype."""
    if tensor.dtype not in dtypes:
        raise FormatError(f"{shown(tensor.name)} is {tensor.dtype}, expected {' or '.join(dtypes)}")


def check_shape(tensor: StoredTensor, *shapes: Sequence[int]) -> None:
    """Raise `FormatError` for a tensor of another shape."""
    if tensor.shape not in [tuple(shape) for shape in shapes]:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise FormatError(f"{shown(tensor.name)} has the shape {_clipped(tensor.shape)}, expected {expected}")


def check_extent(name: str, rows: int, columns: int) -> tuple[int, int]:
    """The shape of a table. Raises `FormatError` if it is empty, or larger than any vocabulary's."""
    if not (0 < rows <= MOST_ROWS and 0 < columns <= MOST_COLUMNS):
        raise FormatError(
            f"{shown(name)} is a table of {rows} rows of {columns}, {TOO_LARGE.format(MOST_ROWS, MOST_COLUMNS)}"
        )
    return rows, columns


def two_axes(tensor: StoredTensor) -> tuple[int, int]:
    """The shape of a matrix. Raises `FormatError` for a tensor with another number of axes."""
    if len(tensor.shape) != 2:
        raise FormatError(f"{shown(tensor.name)} has the shape {_clipped(tensor.shape)}, expected two axes")
    return tensor.shape[0], tensor.shape[1]


def group_size(name: str, columns: int, groups: int, stated: int | None = None) -> int:
    """The columns that share a scale. Raises `FormatError` if so many groups do not cover the columns evenly."""
    size = stated if stated is not None and stated > 0 else columns // max(1, groups)
    if groups < 1 or size < 1 or ceil(columns / size) != groups:
        raise FormatError(f"{shown(name)} has {columns} columns and {groups} groups of scales, expected equal groups")
    return size


def number_in(settings: Mapping[str, Any], key: str) -> int | None:
    """A whole number in a config; `None` if there is none."""
    value = settings.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_COLUMNS else None


def groups_in_words(size: int, columns: int) -> str:
    """How many columns share a scale, in words."""
    return "a scale per row" if size >= columns else f"groups of {size}"


def unpack_words(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """The unsigned codes that 32-bit words hold, lowest bits first: `(..., n)` becomes `(..., n, 32 // bits)`."""
    import numpy as np

    shifts = np.arange(0, 32 - bits + 1, bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)[..., None]
    return ((unsigned >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)


def unpack_columns(
    parts: Parts, role: str, start: int, stop: int, bits: int, order: Sequence[int] | None = None
) -> npt.NDArray[np.uint8]:
    """Columns `[start, stop)` of a matrix of codes that are packed along its second axis.

    `order` gives the place of each code in its word; without it the first code has the lowest bits.
    """
    in_word = 32 // bits
    first = start // in_word
    packed = parts.take(role, slice(None), slice(first, -(-stop // in_word)))
    codes = unpack_words(packed, bits)
    if order is not None:
        codes = codes[..., list(order)]
    return codes.reshape(len(packed), -1)[:, start - first * in_word : stop - first * in_word]


def transposed_rows(
    codes: npt.NDArray[np.uint8],
    zeros: npt.NDArray[np.uint8],
    scales: Floats,
    groups: npt.NDArray[np.int64],
    rounding: float,
) -> DequantisedRows:
    """Dequantise rows whose codes are stored transposed: `weight = scale * (code - zero)`.

    `codes` is `(columns, rows)`, `zeros` and `scales` are `(groups, rows)`. `groups` `(columns,)` is the group of each
    column.
    """
    import numpy as np

    scale = scales[groups]
    values = scale * (codes.astype(np.float32) - zeros[groups].astype(np.float32))
    steps = np.abs(scale) + np.float32(2 * rounding) * np.abs(values)
    return DequantisedRows(np.ascontiguousarray(values.T), np.ascontiguousarray(steps.T))


def _clipped(shape: Sequence[int]) -> str:
    return str(list(shape)) if len(shape) <= 4 else f"{list(shape[:4])} and {len(shape) - 4} axes more"
