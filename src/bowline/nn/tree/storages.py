"""Finds tensors that share memory: two overlapping tensors are an alias, and an alias is not a tie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

__all__ = ["PLAIN", "extent", "knots", "overlap", "overlapping"]

Key = TypeVar("Key")
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The tensor types that hold one matrix of numbers and override no computation."""
Extent = tuple[str, int, int]
"""Device, first and last address; for a tensor without memory (meta), its storage object and the offsets in it."""


def extent(tensor: torch.Tensor) -> Extent | None:
    """The addresses that `tensor` spans, or `None` if unknown (empty, sparse, made of several tensors)."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    reach = tensor.numel()
    if not tensor.is_contiguous():
        reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1)
    if tensor.is_meta:
        start = int(tensor.storage_offset()) * tensor.element_size()
        home = f"meta:{tensor.untyped_storage()._cdata}"
    else:
        start = tensor.data_ptr()
        home = str(tensor.device)
    return home, start, start + reach * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors overlap; those of a matrix's columns interleave.

    Example:
        >>> table = torch.zeros(4, 2)
        >>> overlap(table, table[1:]), overlap(table[:2], table[2:])
        (True, False)
    """
    a, b = extent(one), extent(other)
    return a is not None and b is not None and a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def overlapping(tensors: Sequence[tuple[Key, torch.Tensor]]) -> Iterator[tuple[Key, Key]]:
    """Pairs of keys whose tensors overlap, each with the widest before it, found in one pass over the addresses."""
    spans = sorted((place, at) for at, (_, tensor) in enumerate(tensors) if (place := extent(tensor)) is not None)
    home, end, widest = "", 0, 0
    for (device, start, stop), at in spans:
        if device == home and start < end:
            yield tensors[widest][0], tensors[at][0]
        if device != home or stop > end:
            home, end, widest = device, stop, at


def knots(pairs: Iterable[tuple[Key, Key]]) -> list[list[Key]]:
    """Connected groups, members in the order in which they were first seen."""
    found: list[list[Key]] = []
    for one, other in pairs:
        joined = [knot for knot in found if one in knot or other in knot]
        merged = list(dict.fromkeys([key for knot in joined for key in knot] + [one, other]))
        found = [knot for knot in found if knot not in joined] + [merged]
    return found
