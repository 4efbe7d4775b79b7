"""torchao's tensor subclasses, as transformers 5 saves them in safetensors.

`torchao.prototype.safetensors.flatten_tensor_state_dict` (read in 0.18) writes each inner tensor of `lm_head.weight` as
`lm_head._weight_qdata`, `lm_head._weight_scale` and so on, and the class with its settings as JSON under
`lm_head.weight` in the file's metadata. Read are `Int8Tensor` and `IntxUnpackedToInt8Tensor`
(`weight = (code - zero) * scale`), `Float8Tensor` (`weight = code * scale`), and `Int4Tensor`, whose codes of -8 to 7
stand two a byte, the earlier one in the low bits, with scales and zeros `(groups, rows)`:
`weight = code * scale + zero` (the formula of `mslk`'s `int4_row_quantize_zp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

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
    float_steps,
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
    group_size,
    groups_in_words,
    two_axes,
)
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.errors import FormatError

__all__ = ["torchao"]

MOST_METADATA = 1 << 16


def torchao(facts: Facts) -> QuantisedWeight | None:
    """The weight as a tensor subclass of torchao, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="_weight_qdata", scales="_weight_scale", zeros="_weight_zero_point")
    parts |= facts.beside(both="_weight_scale_and_zero", before="_weight_act_pre_scale")
    if "codes" not in parts:
        return None
    kind, settings = _class(facts)
    if "before" in parts:
        raise unsupported("torchao's scales of activations (act_pre_scale) are not dequantised")
    match kind:
        case "Int8Tensor" | "IntxUnpackedToInt8Tensor" | "Float8Tensor":
            return _bytes(facts, parts, kind, settings)
        case "Int4Tensor":
            return _nibbles(facts, parts)
        case _:
            raise unsupported(
                f"torchao's {kind[:40]} is not dequantised, expected Int8Tensor, Float8Tensor, Int4Tensor"
            )


def _class(facts: Facts) -> tuple[str, Mapping[str, Any]]:
    """The name of the subclass, and its settings."""
    text = facts.metadata.get(facts.name, "")
    if len(text) > MOST_METADATA:
        raise FormatError(f"the metadata of {shown(facts.name)} has {len(text)} characters, expected a few hundred")
    record = loads(text.encode(), f"the metadata of {facts.name}") if text else None
    kind = record.get("_type") if isinstance(record, dict) else None
    settings = record.get("_data") if isinstance(record, dict) else None
    if not isinstance(kind, str):
        raise FormatError(f"the file's metadata does not say which tensor subclass {shown(facts.name)} is")
    return kind, settings if isinstance(settings, Mapping) else {}


def _bytes(facts: Facts, parts: dict[str, Any], kind: str, settings: Mapping[str, Any]) -> QuantisedWeight:
    if "scales" not in parts:
        raise FormatError("_weight_qdata is stored without _weight_scale")
    check_dtype(parts["codes"], *(("F8_E4M3", "F8_E5M2") if kind == "Float8Tensor" else ("I8",)))
    check_dtype(parts["scales"], *FLOATS)
    rows, columns = check_extent(facts.name, *two_axes(parts["codes"]))
    grid = grid_of(parts["scales"], rows, columns, facts)
    if "zeros" in parts:
        check_dtype(parts["zeros"], "I8", "I32", "I64", *FLOATS)
        check_shape(parts["zeros"], parts["scales"].shape)
    target = settings.get("target_dtype")
    narrow = target.get("_data") if isinstance(target, Mapping) else None
    word = {"Int8Tensor": "int8", "Float8Tensor": f"FP8 ({parts['codes'].dtype.removeprefix('F8_')})"}
    name = word.get(kind) or (narrow if isinstance(narrow, str) and len(narrow) < 8 else "int8")
    return QuantisedWeight(
        name=facts.name,
        layout=f"torchao {name}, {grid_in_words(grid, rows, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_byte_rows, grid=grid, rounding=ROUNDING[parts["scales"].dtype]),
    )


def _byte_rows(parts: Parts, start: int, stop: int, *, grid: Grid, rounding: float) -> DequantisedRows:
    import numpy as np

    dtype = parts.tensors["codes"].dtype
    codes = parts.floats("codes", slice(start, stop))
    scales = expand_grid(grid_rows(parts, "scales", grid, start, stop).astype(np.float32), grid, codes.shape[1])
    steps = np.abs(scales) * (np.float32(1) if dtype == "I8" else float_steps(codes, dtype))
    if "zeros" in parts:
        zeros = grid_rows(parts, "zeros", grid, start, stop).astype(np.float32)
        codes = codes - expand_grid(zeros, grid, codes.shape[1])
    values = codes * scales
    return DequantisedRows(values, steps + np.float32(2 * rounding) * np.abs(values))


def _nibbles(facts: Facts, parts: dict[str, Any]) -> QuantisedWeight:
    if not {"scales", "zeros"} <= parts.keys():
        raise FormatError("_weight_qdata is stored without _weight_scale or _weight_zero_point")
    check_dtype(parts["codes"], "I8", "U8")
    rows, packed = two_axes(parts["codes"])
    columns = 2 * packed
    check_extent(facts.name, rows, columns)
    groups, _ = two_axes(parts["scales"])
    for role in ("scales", "zeros"):
        check_dtype(parts[role], *FLOATS)
        check_shape(parts[role], (groups, rows))
    size = group_size(facts.name, columns, groups)
    return QuantisedWeight(
        name=facts.name,
        layout=f"torchao int4, {groups_in_words(size, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_nibble_rows, size=size, rounding=ROUNDING[parts["scales"].dtype]),
    )


def _nibble_rows(parts: Parts, start: int, stop: int, *, size: int, rounding: float) -> DequantisedRows:
    import numpy as np

    octets = parts.take("codes", slice(start, stop)).view(np.uint8)
    codes = np.stack([octets & np.uint8(0x0F), octets >> np.uint8(4)], axis=-1).reshape(stop - start, -1)
    signed = ((codes ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.float32)
    groups = np.arange(signed.shape[1]) // size
    own = (slice(None), slice(start, stop))
    scales, zeros = parts.floats("scales", *own).T[:, groups], parts.floats("zeros", *own).T[:, groups]
    scaled = signed * scales
    steps = np.abs(scales) + np.float32(2 * rounding) * (np.abs(scaled) + np.abs(zeros))
    return DequantisedRows(scaled + zeros, steps)
