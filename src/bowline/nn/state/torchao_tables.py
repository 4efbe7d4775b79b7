"""Reads the int8 table of `bowline quantize`, which is stored as torchao's `Int8Tensor`, as one of `quantize_tied`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["table_parts"]

CODES, SCALE = "._weight_qdata", "._weight_scale"
PARTS = {"qdata", "scale"}


def table_parts(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The names that a table's parts have in a model, by their stored names; empty unless one weight is so stored.

    torchao's own checkpoints hold several quantised weights, of layers that no table replaces.
    """
    stems = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
    if len(stems) != 1 or stems[0] + SCALE not in tensors:
        return {}
    (stem,) = stems
    try:
        record: Any = json.loads(metadata.get(f"{stem}.weight", "null"))
    except ValueError:
        return {}
    if not isinstance(record, dict) or record.get("_type") != "Int8Tensor":
        return {}
    names = record.get("_tensor_data_names")
    if not isinstance(names, list) or {str(name) for name in names} != PARTS:
        return {}  # with zero points, or scales of activations
    return {stem + CODES: f"{stem}.table.values", stem + SCALE: f"{stem}.table.scale"}
