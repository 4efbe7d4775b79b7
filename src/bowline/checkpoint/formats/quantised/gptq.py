"""GPTQ: codes packed along the input dimension, a scale and a zero for each group of inputs and output.

The layout is that of AutoGPTQ's `QuantLinear` and its successor GPTQModel, which vLLM and transformers read: `qweight`
`(in * bits / 32, out)` int32 with the first input in the lowest bits, `scales` `(groups, out)`, `qzeros`
`(groups, out * bits / 32)`, and `g_idx` `(in,)` with the group of each input. `weight = scale * (code - zero)`. In the
format `gptq` the stored zero is one less than the zero; in `gptq_v2` it is the zero. Codes of 2, 4 and 8 bits are read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

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
    unpack_words,
)
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["gptq"]

METHODS = ("gptq", "auto-round", "auto_round", "autoround", "intel/auto-round")


def gptq(facts: Facts) -> QuantisedWeight | None:
    """The weight in GPTQ's layout, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="qweight", scales="scales", zeros="qzeros", groups="g_idx")
    if not {"codes", "scales"} <= parts.keys() or not _is_gptq(facts, parts):
        return None
    check_dtype(parts["codes"], "I32", "U32")
    check_dtype(parts["scales"], *FLOATS)
    packed, rows = two_axes(parts["codes"])
    groups, _ = two_axes(parts["scales"])
    check_shape(parts["scales"], (groups, rows))
    bits = _bits(facts, parts, rows)
    columns = packed * 32 // bits
    check_extent(facts.name, rows, columns)
    if "zeros" in parts:
        check_dtype(parts["zeros"], "I32", "U32")
        check_shape(parts["zeros"], (groups, rows * bits // 32))
    stated = number_in(facts.settings, "group_size")
    if "groups" in parts:
        check_dtype(parts["groups"], "I32", "I64")
        check_shape(parts["groups"], (columns,))
        size = columns // groups if groups else 0
        if not size:
            raise FormatError(f"{parts['scales'].name} has {groups} groups for {columns} inputs")
    else:
        fits = stated if stated is not None and stated > 0 and -(-columns // stated) == groups else None
        size = group_size(facts.name, columns, groups, fits)
    offset = 0 if facts.settings.get("checkpoint_format") == "gptq_v2" else 1
    rounding = ROUNDING[parts["scales"].dtype]
    return QuantisedWeight(
        name=facts.name,
        layout=f"GPTQ {bits} bits, {groups_in_words(size, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_rows, bits=bits, size=size, offset=offset, rounding=rounding),
    )


def _is_gptq(facts: Facts, parts: dict[str, Any]) -> bool:
    if facts.method == "awq":
        return False
    codes, scales = parts["codes"].shape, parts["scales"].shape
    return facts.method in METHODS or "groups" in parts or codes[-1:] == scales[-1:]


def _bits(facts: Facts, parts: dict[str, Any], rows: int) -> int:
    """The width of a code, by the packed zeros if there are any: a config can have exceptions for some modules."""
    stated = number_in(facts.settings, "bits")
    zeros = parts["zeros"].shape[-1] if "zeros" in parts and parts["zeros"].shape else None
    bits = 32 * zeros // rows if zeros and rows else stated
    if bits not in (2, 4, 8):
        raise unsupported(f"GPTQ with {bits} bits is not dequantised, expected 2, 4 or 8 bits")
    return bits


def _rows(
    parts: Parts, start: int, stop: int, *, bits: int, size: int, offset: int, rounding: float
) -> DequantisedRows:
    import numpy as np

    scales = parts.floats("scales", slice(None), slice(start, stop))
    codes = unpack_words(parts.take("codes", slice(None), slice(start, stop)), bits)  # (in / n, rows, n)
    codes = np.moveaxis(codes, -1, 1).reshape(-1, stop - start)  # (in, rows)
    groups = _groups(parts, len(codes), len(scales), size)
    if "zeros" in parts:
        stored = unpack_columns(parts, "zeros", start, stop, bits)
        zeros = (stored + np.uint8(offset)) & np.uint8((1 << bits) - 1)
    else:
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    return transposed_rows(codes, zeros, scales, groups, rounding)


def _groups(parts: Parts, columns: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """The group of each input."""
    import numpy as np

    if "groups" not in parts:
        return np.arange(columns) // size
    groups = parts.take("groups").astype(np.int64)
    if groups.min() < 0 or groups.max() >= count:
        raise FormatError(
            f"{parts.tensors['groups'].name} holds groups from {groups.min()} to {groups.max()}, expected 0 to "
            f"{count - 1}"
        )
    return groups
