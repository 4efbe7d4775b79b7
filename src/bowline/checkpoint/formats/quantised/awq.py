"""AWQ: codes of 4 bits packed along the output dimension, eight outputs in an interleaved order.

The layout is that of AutoAWQ's version `gemm`, which vLLM reads (its `awq_dequantize_triton`): `qweight`
`(in, out / 8)` int32, `qzeros` `(in / group, out / 8)` int32, `scales` `(in / group, out)`. Output `i` of eight stands
in bits `4 * ORDER[i]` and the three above. `weight = scale * (code - zero)`.
"""

from __future__ import annotations

from functools import partial

from bowline.checkpoint.formats.quantised.quantised_weight import (
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
    unsupported,
)
from bowline.checkpoint.formats.quantised.shape_checks import (
    FLOATS,
    ROUNDING,
    check_dtype,
    check_extent,
    check_shape,
    group_size,
    groups_in_words,
    number_in,
    transposed_rows,
    two_axes,
    unpack_columns,
)
from bowline.checkpoint.formats.strict_json import shown

__all__ = ["awq"]

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
IN_WORD = 8


def awq(facts: Facts) -> QuantisedWeight | None:
    """The weight in AWQ's layout, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="qweight", scales="scales", zeros="qzeros")
    if len(parts) < 3:
        return None
    version, bits = facts.settings.get("version", "gemm"), number_in(facts.settings, "bits") or 4
    known = isinstance(version, str) and version.lower() in ("gemm", "exllama", "marlin")
    if facts.method == "awq" and (not known or bits != 4):
        raise unsupported(f"AWQ of version {shown(version)} with {bits} bits is not dequantised, expected gemm and 4")
    check_dtype(parts["codes"], "I32", "U32")
    check_dtype(parts["zeros"], "I32", "U32")
    check_dtype(parts["scales"], *FLOATS)
    columns, packed = two_axes(parts["codes"])
    groups, _ = two_axes(parts["scales"])
    rows = packed * IN_WORD
    check_extent(facts.name, rows, columns)
    check_shape(parts["scales"], (groups, rows))
    check_shape(parts["zeros"], (groups, packed))
    size = group_size(facts.name, columns, groups)
    if columns % groups:
        size = group_size(facts.name, columns, groups, number_in(facts.settings, "group_size") or size)
    return QuantisedWeight(
        name=facts.name,
        layout=f"AWQ 4 bits, {groups_in_words(size, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_rows, size=size, rounding=ROUNDING[parts["scales"].dtype]),
    )


def _rows(parts: Parts, start: int, stop: int, *, size: int, rounding: float) -> DequantisedRows:
    import numpy as np

    codes, zeros = (unpack_columns(parts, role, start, stop, 4, ORDER) for role in ("codes", "zeros"))
    scales = parts.floats("scales", slice(None), slice(start, stop))
    return transposed_rows(codes, zeros, scales, np.arange(len(codes)) // size, rounding)
