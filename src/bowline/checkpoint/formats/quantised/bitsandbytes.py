"""bitsandbytes: int8 rows with their largest value, and 4-bit codes from a table of 16 values (NF4, FP4).

Eight bits (`bitsandbytes.functional.int8_vectorwise_dequant`): `weight` int8 and `SCB` float32, the largest magnitude
of each row; `weight = code * SCB / 127`, with the factor that bitsandbytes writes as 7.874015718698502e-3.

Four bits (`QuantState.as_dict(packed=True)` and `dequantize_4bit`): `weight` uint8, two codes a byte, the earlier one
in the high bits; `weight.quant_map` with the 16 values; `weight.absmax`, a scale for each block of the flattened
weight; `weight.quant_state.bitsandbytes__nf4` (or `fp4`), JSON as bytes with shape and block size. With double
quantisation `absmax` is uint8: `nested_quant_map[absmax] * nested_absmax[block] + nested_offset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from bowline.checkpoint.formats.quantised.quantised_weight import (
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
    unsupported,
)
from bowline.checkpoint.formats.quantised.shape_checks import (
    check_dtype,
    check_extent,
    check_shape,
    number_in,
    two_axes,
)
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["bitsandbytes_4bit", "bitsandbytes_8bit"]

TO_UNIT = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""
KINDS = {"nf4": "NF4", "fp4": "FP4"}


def bitsandbytes_8bit(facts: Facts) -> QuantisedWeight | None:
    """The weight as bitsandbytes' int8 rows, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="weight", scales="SCB", format="weight_format")
    if not {"codes", "scales"} <= parts.keys():
        return None
    check_dtype(parts["codes"], "I8")
    check_dtype(parts["scales"], "F32", "F16", "BF16")
    rows, columns = check_extent(facts.name, *two_axes(parts["codes"]))
    check_shape(parts["scales"], (rows,), (rows, 1))
    if "format" in parts:
        check_shape(parts["format"], (), (1,))
        layout = facts.read(parts["format"])
        if layout is not None and int(layout.reshape(-1)[0]) != 0:
            raise unsupported(f"weight_format {int(layout.reshape(-1)[0])} is not dequantised, expected 0 (rows)")
    return QuantisedWeight(
        name=facts.name,
        layout="bitsandbytes int8, a scale per row",
        parts=parts,
        shape=(rows, columns),
        expand=_int8_rows,
    )


def _int8_rows(parts: Parts, start: int, stop: int) -> DequantisedRows:
    import numpy as np

    largest = parts.floats("scales", slice(start, stop)).reshape(-1, 1)
    codes = parts.floats("codes", slice(start, stop))
    return DequantisedRows(codes * largest * np.float32(TO_UNIT), np.abs(largest) * np.float32(TO_UNIT))


def bitsandbytes_4bit(facts: Facts) -> QuantisedWeight | None:
    """The weight as bitsandbytes' 4-bit blocks, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="weight", scales="weight.absmax", map="weight.quant_map")
    parts |= facts.beside(nested="weight.nested_absmax", nested_map="weight.nested_quant_map")
    kind = next((kind for kind in KINDS if f"{facts.name}.quant_state.bitsandbytes__{kind}" in facts.tensors), None)
    if not {"codes", "scales"} <= parts.keys():
        return None
    if kind is None or "map" not in parts:
        raise FormatError("weight.absmax is stored without quant_map or quant_state, expected both")
    parts["state"] = facts.tensors[f"{facts.name}.quant_state.bitsandbytes__{kind}"]
    check_dtype(parts["state"], "U8")
    check_dtype(parts["codes"], "U8", "I8")
    check_dtype(parts["map"], "F32")
    check_shape(parts["map"], (16,))
    layout = f"bitsandbytes {KINDS[kind]}"
    raw = facts.read(parts["state"])
    if raw is None:
        return QuantisedWeight(name=facts.name, layout=layout, parts=parts)
    state = loads(raw.tobytes(), parts["state"].name)
    if not isinstance(state, dict):
        raise FormatError(f"{shown(parts['state'].name)} holds no object, expected shape and blocksize")
    rows, columns = _shape(facts.name, state)
    block = number_in(state, "blocksize")
    if block is None or block < 1:
        raise FormatError(f"{shown(parts['state'].name)} says blocksize {shown(state.get('blocksize'))}, expected >= 1")
    if parts["codes"].nbytes != -(-rows * columns // 2):
        raise FormatError(f"{shown(facts.name)} has {parts['codes'].nbytes} bytes for {rows} rows of {columns}")
    blocks = -(-rows * columns // block)
    check_shape(parts["scales"], (blocks,))
    nested, offset = 0, 0.0
    if parts["scales"].dtype == "U8":
        nested, offset = _nested(parts, state, blocks)
    else:
        check_dtype(parts["scales"], "F32", "F16", "BF16")
    twice = ", scales of 8 bits" if nested else ""
    return QuantisedWeight(
        name=facts.name,
        layout=f"{layout}, blocks of {block}{twice}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_4bit_rows, columns=columns, block=block, nested=nested, offset=offset),
    )


def _shape(name: str, state: Mapping[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(side) is int for side in shape)):
        raise FormatError(f"{shown(name)}: its quant_state says the shape {shown(shape)}, expected two numbers")
    return check_extent(name, shape[0], shape[1])


def _nested(parts: Mapping[str, StoredTensor], state: Mapping[str, Any], blocks: int) -> tuple[int, float]:
    """The block size of the scales' own scales, and the offset."""
    size, offset = number_in(state, "nested_blocksize"), state.get("nested_offset")
    if "nested" not in parts or "nested_map" not in parts or size is None or size < 1:
        raise FormatError("absmax is quantised, but nested_absmax, nested_quant_map or nested_blocksize is missing")
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not isfinite(offset):
        raise FormatError(f"nested_offset is {shown(offset)}, expected a number")
    check_dtype(parts["nested"], "F32")
    check_dtype(parts["nested_map"], "F32")
    check_shape(parts["nested"], (-(-blocks // size),))
    check_shape(parts["nested_map"], (256,))
    return size, float(offset)


def _4bit_rows(
    parts: Parts, start: int, stop: int, *, columns: int, block: int, nested: int, offset: float
) -> DequantisedRows:
    import numpy as np

    first, last = start * columns, stop * columns
    octets = parts.octets("codes", first // 2, -(-last // 2))
    codes = np.stack([octets >> np.uint8(4), octets & np.uint8(0x0F)], axis=-1).reshape(-1)
    codes = codes[first % 2 : first % 2 + last - first]
    begin, end = first // block, -(-last // block)
    scales = parts.take("scales", slice(begin, end))
    if nested:
        places = np.arange(begin, end) // nested
        own = parts.floats("nested", slice(int(places[0]), int(places[-1]) + 1)) if len(places) else np.empty(0)
        scales = parts.floats("nested_map")[scales] * own[places - places[:1]] + np.float32(offset)
    scales = scales.astype(np.float32)[np.arange(first, last) // block - begin]
    table = parts.floats("map")
    values = table[codes] * scales
    steps = _gaps(table)[codes] * np.abs(scales)
    return DequantisedRows(values.reshape(-1, columns), steps.reshape(-1, columns))


def _gaps(table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The distance of each value of a code table from its farther neighbour."""
    import numpy as np

    order = np.argsort(table)
    between = np.diff(table[order])
    gaps = np.empty_like(table)
    gaps[order] = np.maximum(np.append(between, 0), np.append(np.float32(0), between))
    return gaps
