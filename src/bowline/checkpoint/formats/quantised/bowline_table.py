"""The int8 table of `bowline.nn.quantize_tied`, which serves both ends of a tie.

`table.values` `(rows, columns)` int8 and `table.scale` `(rows, 1)` or `(rows,)`; `weight = code * scale`.
"""

from __future__ import annotations

from bowline.checkpoint.formats.quantised.quantised_weight import (
    SERVES_BOTH,
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
)
from bowline.checkpoint.formats.quantised.shape_checks import check_dtype, check_extent, check_shape, two_axes

__all__ = ["bowline_table"]


def bowline_table(facts: Facts) -> QuantisedWeight | None:
    """The weight as a table of `quantize_tied`, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="table.values", scales="table.scale")
    if len(parts) < 2 or facts.name in facts.tensors:
        return None
    check_dtype(parts["codes"], "I8")
    check_dtype(parts["scales"], "F32", "F16", "BF16")
    rows, columns = check_extent(facts.name, *two_axes(parts["codes"]))
    check_shape(parts["scales"], (rows,), (rows, 1))
    return QuantisedWeight(
        name=facts.name,
        layout=SERVES_BOTH,
        parts=parts,
        shape=(rows, columns),
        expand=_rows,
    )


def _rows(parts: Parts, start: int, stop: int) -> DequantisedRows:
    import numpy as np

    scales = parts.floats("scales", slice(start, stop)).reshape(-1, 1)
    return DequantisedRows(parts.floats("codes", slice(start, stop)) * scales, np.abs(scales))
