"""Codes of 8 bits, one a byte, with scales beside them: FP8 and int8 checkpoints of several tools.

`weight` `(rows, columns)` F8_E4M3, F8_E5M2 or I8, and `weight_scale` (compressed-tensors' `int-quantized` and
`float-quantized`, fbgemm, ModelOpt) or `weight_scale_inv` (transformers' fine-grained FP8, DeepSeek). Both are factors:
`weight = scale * (code - zero)`. A scale belongs to the whole tensor, a row, a group of columns in a row, or a block.
Where the scales do not cover the table evenly, the block is the config's `weight_block_size`, or 128 by 128; so are the
last rows and columns of transformers' `FP8Linear` shorter than a block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bowline.checkpoint.formats.quantised.quantised_weight import DequantisedRows, Facts, Parts, QuantisedWeight
from bowline.checkpoint.formats.quantised.shape_checks import (
    FLOATS,
    ROUNDING,
    check_dtype,
    check_extent,
    check_shape,
    groups_in_words,
    number_in,
    two_axes,
)
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Grid", "expand_grid", "float_steps", "grid_of", "grid_rows", "scaled_codes"]

SMALL_FLOATS = {"F8_E4M3": (3, -6), "F8_E5M2": (2, -14)}
"""The bits of the mantissa, and the exponent of the smallest normal number."""
DEFAULT_BLOCK = (128, 128)

Grid = tuple[int, int]
"""The rows and columns that share a scale."""


def scaled_codes(facts: Facts) -> QuantisedWeight | None:
    """The weight as 8-bit codes with scales, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="weight", scales="weight_scale", inverse="weight_scale_inv", zeros="weight_zero_point")
    parts |= facts.beside(groups="weight_g_idx")
    codes = parts.get("codes")
    if codes is None or codes.dtype not in (*SMALL_FLOATS, "I8") or not {"scales", "inverse"} & parts.keys():
        return None
    if "scales" in parts and "inverse" in parts:
        raise FormatError("both weight_scale and weight_scale_inv are stored, expected one")
    if "inverse" in parts:
        parts["scales"] = parts.pop("inverse")
    if "groups" in parts:
        raise FormatError("columns in another order (weight_g_idx) are not dequantised for 8-bit codes")
    rows, columns = check_extent(facts.name, *two_axes(codes))
    check_dtype(parts["scales"], *FLOATS, "F8_E8M0")
    grid = grid_of(parts["scales"], rows, columns, facts)
    if "zeros" in parts:
        check_dtype(parts["zeros"], "I8", "U8", "I32")
        check_shape(parts["zeros"], parts["scales"].shape)
    kind = "int8" if codes.dtype == "I8" else f"FP8 ({codes.dtype.removeprefix('F8_')})"
    tool = {"compressed-tensors": "compressed-tensors ", "fbgemm_fp8": "fbgemm ", "modelopt": "ModelOpt "}
    return QuantisedWeight(
        name=facts.name,
        layout=f"{tool.get(facts.method, '')}{kind}, {grid_in_words(grid, rows, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_rows, grid=grid, rounding=ROUNDING[parts["scales"].dtype]),
    )


def grid_of(scales: StoredTensor, rows: int, columns: int, facts: Facts) -> Grid:
    """The rows and columns of a table that share one of these scales."""
    shape = scales.shape
    if shape in ((), (1,), (1, 1)):
        return rows, columns
    if shape == (rows,):
        return 1, columns
    if len(shape) != 2 or not (0 < shape[0] <= rows and 0 < shape[1] <= columns):
        raise FormatError(f"{shown(scales.name)} has {len(shape)} axes for a table of {rows} rows of {columns}")
    stated = facts.settings.get("weight_block_size")
    candidates: list[Grid] = [(rows // shape[0], columns // shape[1])]
    if isinstance(stated, list) and len(stated) == 2:
        sides = [number_in({"side": side}, "side") for side in stated]
        if sides[0] and sides[1] and min(sides[0], sides[1]) > 0:
            candidates.insert(0, (sides[0], sides[1]))
    candidates.append(DEFAULT_BLOCK)
    for height, width in candidates:
        if (-(-rows // height), -(-columns // width)) == shape:
            return height, width
    raise FormatError(f"{shown(scales.name)} has the shape {list(shape)}, which does not divide {rows} by {columns}")


def grid_in_words(grid: Grid, rows: int, columns: int) -> str:
    """What shares a scale, in words."""
    height, width = grid
    if height >= rows > 1 and width >= columns:
        return "a scale for all"
    return groups_in_words(width, columns) if height == 1 else f"blocks of {height} by {width}"


def grid_rows(parts: Parts, role: str, grid: Grid, start: int, stop: int) -> npt.NDArray[Any]:
    """The scales (or zeros) of rows `[start, stop)`, a row each, a column for each group."""
    import numpy as np

    shape = parts.tensors[role].shape
    if len(shape) < 2:
        flat = parts.take(role).reshape(-1)
        return np.broadcast_to(flat, (stop - start,))[:, None] if flat.size == 1 else flat[start:stop, None]
    first = start // grid[0]
    taken = parts.take(role, slice(first, -(-stop // grid[0])))
    return taken[np.arange(start, stop) // grid[0] - first]


def expand_grid(scales: npt.NDArray[Any], grid: Grid, columns: int) -> npt.NDArray[Any]:
    """One scale a column, from one a group; a single one is left to broadcast."""
    import numpy as np

    return scales if scales.shape[1] == 1 else np.repeat(scales, grid[1], axis=1)[:, :columns]


def float_steps(codes: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """The distance from each 8-bit float to the next larger one in magnitude."""
    import numpy as np

    mantissa, least = SMALL_FLOATS[dtype]
    exponent = np.maximum(np.frexp(codes)[1] - 1, least)
    steps: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponent - mantissa).astype(np.float32)
    return steps


def _rows(parts: Parts, start: int, stop: int, *, grid: Grid, rounding: float) -> DequantisedRows:
    import numpy as np

    tensor = parts.tensors["codes"]
    codes = parts.floats("codes", slice(start, stop))
    scales = expand_grid(grid_rows(parts, "scales", grid, start, stop).astype(np.float32), grid, codes.shape[1])
    steps = np.abs(scales)
    if tensor.dtype != "I8":
        steps = steps * float_steps(codes, tensor.dtype)
    if "zeros" in parts:
        zeros = grid_rows(parts, "zeros", grid, start, stop).astype(np.float32)
        codes = codes - expand_grid(zeros, grid, codes.shape[1])
    values = codes * scales
    return DequantisedRows(values, steps + np.float32(2 * rounding) * np.abs(values))
