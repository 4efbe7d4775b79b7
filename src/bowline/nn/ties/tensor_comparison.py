"""Compares two tensors: the state of a tie between them, and where their values differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bowline.functional.row_shard import is_dtensor
from bowline.nn.tree.sharding import local_part, placed_alike
from bowline.nn.tree.storages import PLAIN, extent, overlap
from bowline.tie import TieState

__all__ = ["TensorDifference", "difference", "is_plain", "kind_of", "same_bits", "state_of"]

BLOCK_ELEMENTS = 1 << 20
"""Values per block of a comparison, so that memory stays bounded for any table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Where two tensors of one shape differ: `rows` of `of` rows, by at most `largest` (NaN against a number: inf)."""

    rows: int
    of: int
    largest: float

    def __str__(self) -> str:
        return f"{self.rows} of {self.of} rows differ, by at most {self.largest:.3g}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds one matrix of numbers: not quantised, sharded, or wrapped by a computing subclass."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def kind_of(tensor: torch.Tensor) -> str:
    """Describes in words a tensor that is not plain."""
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype})"
    return f"a {type(tensor).__name__}" if tensor.layout is torch.strided else f"{tensor.layout}"


def state_of(target: torch.Tensor, source: torch.Tensor) -> TieState:
    """The state of a tie between two existing tensors.

    `ALIAS` is the same memory, element for element; two views that are shifted or transposed are compared by value.
    `EQUAL` is equality of bits: a NaN equals itself, 0.0 is not -0.0. Two tensors without values (meta) are a clone of
    each other when they agree in shape and dtype. Two DTensors of one mesh and placement are compared by this process's
    parts, without communication.

    Example:
        >>> table = torch.nn.Parameter(torch.zeros(3, 2))
        >>> state_of(table, table), state_of(table.detach(), table), state_of(table.detach().clone(), table)
        (<TieState.SHARED: 'SHARED'>, <TieState.ALIAS: 'ALIAS'>, <TieState.EQUAL: 'EQUAL'>)
    """
    if target is source:
        return TieState.SHARED
    if is_dtensor(target) and target.shape == source.shape and placed_alike(target, source):
        return state_of(local_part(target), local_part(source))
    if not (is_plain(target) and is_plain(source)):
        return TieState.INCOMPATIBLE
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        return TieState.INCOMPATIBLE
    if overlap(target, source) and (extent(target), target.stride()) == (extent(source), source.stride()):
        return TieState.ALIAS
    if target.device != source.device:
        return TieState.INCOMPATIBLE
    return TieState.EQUAL if target.is_meta or same_bits(target, source) else TieState.DIVERGED


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits. Stops at the first block that differs."""
    with torch.no_grad():
        return all(torch.equal(_bits(a), _bits(b)) for a, b in _blocks(one, other))


def difference(one: torch.Tensor, other: torch.Tensor) -> TensorDifference:
    """Rows (along the first axis) that differ in any bit, and the largest absolute difference of those, in float64.

    Of DTensors, the rows of this process's parts.
    """
    one, other = local_part(one), local_part(other)
    rows, largest = 0, 0.0
    with torch.no_grad():
        for a, b in _blocks(one, other):
            differ = _bits(a) != _bits(b)
            if differ.any():
                rows += int(differ.reshape(len(a), -1).any(1).sum())
                gap = (a.double() - b.double()).abs()[differ]
                largest = max(largest, float(torch.nan_to_num(gap, nan=torch.inf, posinf=torch.inf).max()))
    return TensorDifference(rows=rows, of=len(one) if one.ndim else 1, largest=largest)


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if one.ndim == 0:
        one, other = one[None], other[None]
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    step = max(1, BLOCK_ELEMENTS // max(1, one[0].numel() if len(one) else 1))
    return zip(torch.split(one.detach(), step), torch.split(other.detach(), step), strict=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
