"""The table of `bowline.nn.quantize_tied`, which serves both ends of a tie.

int8: `table.values` `(rows, columns)` int8 and `table.scale` `(rows,)` or `(rows, groups)`; `weight = code * scale`.
int4: `table.values` `(rows, columns / 2)` uint8, where byte i of a group of G columns holds its code i in the low bits
and its code i + G / 2 in the high ones, `table.scale` `(rows, groups)` and `table.zero` `(rows, groups)` uint8;
`weight = (code - zero / 16) * scale`.
"""

from __future__ import annotations

from bowline.checkpoint.formats.quantised.quantised_weight import (
    SERVES_BOTH,
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
)
from bowline.checkpoint.formats.quantised.shape_checks import (
    check_dtype,
    check_extent,
    check_shape,
    group_size,
    groups_in_words,
    two_axes,
)
from bowline.errors import FormatError

__all__ = ["bowline_table"]


def bowline_table(facts: Facts) -> QuantisedWeight | None:
    """The weight as a table of `quantize_tied`, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="table.values", scales="table.scale", zeros="table.zero")
    if not {"codes", "scales"} <= parts.keys() or facts.name in facts.tensors:
        return None
    is_int4 = "zeros" in parts
    check_dtype(parts["codes"], "U8" if is_int4 else "I8")
    check_dtype(parts["scales"], "F64", "F32", "F16", "BF16")
    rows, packed = two_axes(parts["codes"])
    rows, columns = check_extent(facts.name, rows, 2 * packed if is_int4 else packed)
    groups = 1 if len(parts["scales"].shape) == 1 else two_axes(parts["scales"])[1]
    size = group_size(facts.name, columns, groups)
    if size * groups != columns or (is_int4 and size % 2):
        raise FormatError(f"{facts.name} has {columns} columns in {groups} groups, expected groups of one even size")
    check_shape(parts["scales"], (rows, groups), *([(rows,)] if groups == 1 and not is_int4 else []))
    if is_int4:
        check_dtype(parts["zeros"], "U8")
        check_shape(parts["zeros"], (rows, groups))
    return QuantisedWeight(
        name=facts.name,
        layout=f"{'int4' if is_int4 else 'int8'} {SERVES_BOTH}"
        + (f", {groups_in_words(size, columns)}" if groups > 1 or is_int4 else ""),
        parts=parts,
        shape=(rows, columns),
        expand=_nibble_rows if is_int4 else _rows,
    )


def _rows(parts: Parts, start: int, stop: int) -> DequantisedRows:
    import numpy as np

    scales = parts.floats("scales", slice(start, stop)).reshape(stop - start, -1, 1)
    codes = parts.floats("codes", slice(start, stop))
    groups = codes.reshape(stop - start, scales.shape[1], -1)
    steps = np.broadcast_to(np.abs(scales), groups.shape).reshape(codes.shape)
    return DequantisedRows((groups * scales).reshape(codes.shape), steps)


def _nibble_rows(parts: Parts, start: int, stop: int) -> DequantisedRows:
    import numpy as np

    own = slice(start, stop)
    scales, zeros = parts.floats("scales", own)[..., None], parts.floats("zeros", own)[..., None] / np.float32(16)
    octets = parts.take("codes", own).reshape(stop - start, scales.shape[1], -1)
    codes = np.concatenate([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1).astype(np.float32)
    steps = np.broadcast_to(np.abs(scales), codes.shape)
    return DequantisedRows(
        ((codes - zeros) * scales).reshape(stop - start, -1), np.ascontiguousarray(steps).reshape(stop - start, -1)
    )
