"""compressed-tensors' `pack-quantized`: codes of 1 to 8 bits packed along the input dimension, with scales.

The layout is that of the package `compressed_tensors` (`compressors/pack_quantized`, read in 0.17): `weight_packed`
`(rows, ceil(columns / n))` int32 with `n = 32 // bits` codes a word, the first in the lowest bits, each code plus
`2**(bits - 1)`; `weight_scale` `(rows, groups)`; `weight_shape` with the weight's shape; for asymmetric schemes
`weight_zero_point`, packed alike along the rows. `weight = scale * (code - zero)`. Its `int-quantized` and
`float-quantized` formats are in `scaled_codes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bowline.checkpoint.formats.quantised.quantised_weight import (
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
    unsupported,
)
from bowline.checkpoint.formats.quantised.scaled_codes import (
    Grid,
    expand_grid,
    grid_in_words,
    grid_of,
    grid_rows,
)
from bowline.checkpoint.formats.quantised.shape_checks import (
    FLOATS,
    ROUNDING,
    check_dtype,
    check_extent,
    check_shape,
    number_in,
    two_axes,
    unpack_words,
)
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["pack_quantized"]


def pack_quantized(facts: Facts) -> QuantisedWeight | None:
    """The weight in the format `pack-quantized`, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="weight_packed", scales="weight_scale", shape="weight_shape")
    parts |= facts.beside(zeros="weight_zero_point", groups="weight_g_idx", whole="weight_global_scale")
    if not {"codes", "scales"} <= parts.keys():
        return None
    if "whole" in parts or parts["codes"].dtype == "U8":
        raise unsupported("compressed-tensors' 4-bit floats (NVFP4, MXFP4) are not dequantised")
    if "shape" not in parts:
        raise FormatError("weight_packed is stored without weight_shape, expected both")
    if "groups" in parts:
        raise unsupported("columns in another order (weight_g_idx) are not dequantised for compressed-tensors")
    check_dtype(parts["codes"], "I32", "U32")
    check_dtype(parts["scales"], *FLOATS)
    rows, packed = two_axes(parts["codes"])
    bits = _bits(facts, rows, packed)
    in_word = 32 // bits
    layout = f"compressed-tensors {bits} bits"
    columns = _columns(facts, parts["shape"], rows)
    if columns is None:
        return QuantisedWeight(name=facts.name, layout=layout, parts=parts)
    check_extent(facts.name, rows, columns)
    if -(-columns // in_word) != packed:
        raise FormatError(f"a row of {packed} words does not hold {columns} codes of {bits} bits")
    grid = grid_of(parts["scales"], rows, columns, facts)
    if "zeros" in parts:
        check_dtype(parts["zeros"], "I32", "U32")
        check_shape(parts["zeros"], (-(-rows // in_word), *parts["scales"].shape[1:]))
        if len(parts["scales"].shape) != 2 or parts["scales"].shape[0] != rows:
            raise FormatError(f"{shown(parts['scales'].name)} has packed zeros, expected a row of scales for each row")
    return QuantisedWeight(
        name=facts.name,
        layout=f"{layout}, {grid_in_words(grid, rows, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_rows, bits=bits, grid=grid, columns=columns, rounding=ROUNDING[parts["scales"].dtype]),
    )


def _columns(facts: Facts, tensor: StoredTensor, rows: int) -> int | None:
    """The columns that `weight_shape` says; `None` if it was not read."""
    check_dtype(tensor, "I64", "I32")
    check_shape(tensor, (2,))
    shape = facts.read(tensor)
    if shape is None:
        return None
    if int(shape[0]) != rows:
        raise FormatError(f"{shown(tensor.name)} says {int(shape[0])} rows, but {rows} are stored")
    return int(shape[1])


def _bits(facts: Facts, rows: int, packed: int) -> int:
    """The width of a code: that of the config's group for this module, or of its only group."""
    groups = [scheme for scheme in _schemes(facts.settings) if number_in(scheme["weights"], "num_bits")]
    widths = {number_in(scheme["weights"], "num_bits") for scheme in groups}
    if len(widths) > 1:
        widths = {number_in(scheme["weights"], "num_bits") for scheme in groups if _is_target(scheme, facts.module)}
    bits = widths.pop() if len(widths) == 1 else None
    if bits is None or not 1 <= bits <= 8:
        raise FormatError(f"config.json does not say how many bits (1 to 8) a code of {facts.name} has")
    return bits


def _schemes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    for scheme in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(scheme, Mapping) and isinstance(scheme.get("weights"), Mapping):
            yield scheme


def _is_target(scheme: Mapping[str, Any], module: str) -> bool:
    """Whether a group of the config names this module, literally or as a regular expression without repetition."""
    targets = scheme.get("targets")
    for target in targets if isinstance(targets, list) else ():
        if target == module:
            return True
        if isinstance(target, str) and target.startswith("re:") and re.fullmatch(r"re:(\.\*)?[\w.\\]+\$?", target):
            name = target.removeprefix("re:").removeprefix(".*").rstrip("$").replace("\\.", ".")
            if module == name or (target.startswith("re:.*") and module.endswith(name)):
                return True
    return False


def _rows(
    parts: Parts, start: int, stop: int, *, bits: int, grid: Grid, columns: int, rounding: float
) -> DequantisedRows:
    import numpy as np

    words = parts.take("codes", slice(start, stop))
    codes = unpack_words(words, bits).reshape(stop - start, -1)[:, :columns].astype(np.float32)
    scales = expand_grid(grid_rows(parts, "scales", grid, start, stop).astype(np.float32), grid, columns)
    if "zeros" in parts:
        codes = codes - expand_grid(_zeros(parts, bits, start, stop), grid, columns)
    else:
        codes = codes - np.float32(1 << (bits - 1))
    values = codes * scales
    return DequantisedRows(values, np.abs(scales) + np.float32(2 * rounding) * np.abs(values))


def _zeros(parts: Parts, bits: int, start: int, stop: int) -> npt.NDArray[np.float32]:
    """The zeros of rows `[start, stop)`, as codes before the offset: the offsets of code and zero cancel."""
    import numpy as np

    in_word = 32 // bits
    first = start // in_word
    unpacked = unpack_words(parts.take("zeros", slice(first, -(-stop // in_word))), bits)  # (words, groups, n)
    rows = np.moveaxis(unpacked, -1, 1).reshape(-1, unpacked.shape[1])
    return rows[start - first * in_word : stop - first * in_word].astype(np.float32)
