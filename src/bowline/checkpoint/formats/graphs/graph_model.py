"""A graph as a checkpoint: its stored tensors, with the table and the heads found by their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bowline.checkpoint.formats.graphs import GraphFormat
from bowline.checkpoint.formats.graphs.uses import Scaling, Use, Uses
from bowline.checkpoint.formats.storage_view import gap_strides
from bowline.checkpoint.formats.stored_tensor import StoredTensor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GraphModel", "Head", "dequantise", "graph_model"]

MOST_SCALES: Final = 1 << 24


class Head(NamedTuple):
    """The matrix of one head: its tensor, and the node that multiplies by it."""

    tensor: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphModel:
    """The tensors of one file, and which of them are the table and the heads."""

    format: GraphFormat
    files: tuple[str, ...]
    """The file, and those that hold its external data."""
    tensors: Mapping[str, StoredTensor]
    """The tensors as stored; table and heads with the vocabulary's rows first, by strides where the file has
    them the other way round."""
    table: str | None
    copies: tuple[str, ...]
    """Further tables of look-ups that have the table's shape."""
    heads: tuple[Head, ...]
    scaling: Mapping[str, Scaling]
    """For each tensor of codes, the scale and the zero point that turn them into numbers."""
    coded: Mapping[str, int]
    """The stored bytes of the tensors whose numbers are varints."""
    opaque: frozenset[str]
    """Matrices of the table and the heads whose numbers are packed in a way that is not read."""


def graph_model(
    kind: GraphFormat,
    files: tuple[str, ...],
    uses: Uses,
    stored: Mapping[str, StoredTensor],
    coded: Mapping[str, int],
) -> GraphModel:
    """The model of these tensors and their uses; `stored` has the place of each tensor of `uses`, by the same key."""
    tables, heads = _ends(uses)
    views = {use.tensor: use for use in (*heads, *tables)}  # a matrix of both is seen as the look-up has it
    tensors, opaque = dict(stored), set()
    for key, use in views.items():
        seen = _as_rows(stored[key], use, uses)
        if seen is None:
            opaque.add(key)
        else:
            tensors[key] = seen
    return GraphModel(
        format=kind,
        files=files,
        tensors=tensors,
        table=tables[0].tensor if tables else None,
        copies=tuple(dict.fromkeys(use.tensor for use in tables[1:] if use.tensor != tables[0].tensor)),
        heads=tuple({use.tensor: Head(use.tensor, use.node) for use in reversed(heads)}.values())[::-1],
        scaling={key: use.scaling for key, use in views.items() if use.scaling is not None and key not in opaque},
        coded=coded,
        opaque=frozenset(opaque),
    )


def _ends(uses: Uses) -> tuple[list[Use], list[Use]]:
    """The look-ups of the vocabulary's table, and the heads' products.

    The table is the largest one that a product at an output fits, otherwise the one with the most rows.
    """
    lookups = sorted(uses.lookups, key=lambda use: -prod(use.shape))
    shapes = [use.shape for use in lookups]
    known = set(shapes)
    fitting = [use for use in uses.at_output if use.shape in known]
    if not fitting:  # the head's rows may be padded, or the way to the output unknown
        alone = [use for use in uses.products if use.shape == (shapes[0] if shapes else None)]
        padded = [use for use in uses.at_output if shapes and use.shape[1] == shapes[0][1]]
        padded = [use for use in padded if 2 * use.shape[0] > shapes[0][0]]
        fitting = alone if len({use.tensor for use in alone}) == 1 else padded
    wanted = next((use.shape for use in fitting if use.shape in known), None)
    wanted = wanted or (shapes[0] if shapes else None)
    tables = [use for use in lookups if use.shape == wanted]
    return tables, fitting


def _as_rows(tensor: StoredTensor, use: Use, uses: Uses) -> StoredTensor | None:
    """The matrix with the vocabulary's rows first, dequantised if it has a scale; `None` if it cannot be read so."""
    codes = tensor.dtype in ("I8", "U8")
    if not use.readable or len(tensor.shape) != 2 or codes != (use.scaling is not None):
        return None
    if tensor.dtype not in ("F64", "F32", "F16", "BF16", "I8", "U8"):
        return None
    if use.scaling is not None and not _fits(tensor, use.scaling, uses):
        return None
    dtype = f"{tensor.dtype}*scale" if codes else tensor.dtype
    if use.transposed and min(tensor.shape) > 0:
        strides = tensor.strides or (tensor.shape[1], 1)
        turned = tensor._replace(dtype=dtype, shape=tensor.shape[::-1], strides=strides[::-1])
        return turned._replace(strides=gap_strides(turned.shape, strides[::-1]))
    return tensor._replace(dtype=dtype)


def _fits(tensor: StoredTensor, scaling: Scaling, uses: Uses) -> bool:
    """Whether the scaling can be read: one scale (and zero point) for the matrix, or one for each row or column."""
    scale = uses.tensors[scaling.scale]
    zero = uses.tensors[scaling.zero_point] if scaling.zero_point is not None else None
    for one in (scale, zero):
        if one is not None and (len(one.shape) > 1 or prod(one.shape) > MOST_SCALES):
            return False
        if one is not None and prod(one.shape) != 1 and tensor.shape[scaling.axis : scaling.axis + 1] != one.shape:
            return False
    return scale.dtype in ("F32", "F16", "BF16") and (zero is None or zero.dtype == tensor.dtype)


def dequantise(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[Any],
    zero_point: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    """`(codes - zero_point) * scale` in float32, as ONNX's DequantizeLinear computes it.

    Example:
        >>> import numpy as np
        >>> dequantise(np.array([[1, -2]], np.int8), np.float32(0.5), None)
        array([[ 0.5, -1. ]], dtype=float32)
    """
    import numpy as np

    whole = codes.astype(np.int32)
    if zero_point is not None:
        whole -= zero_point.astype(np.int32)
    values: npt.NDArray[Any] = whole.astype(np.float32) * scale.astype(np.float32)
    return values
