"""Whether the processes of a group hold the same numbers, by one small all-reduce of each tensor's checksum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from bowline.functional.row_shard import is_dtensor

__all__ = ["checksum", "compared_across"]

BLOCK_ELEMENTS = 1 << 20
Group = distributed.ProcessGroup


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number of the tensor's bits and their places, int64: two tensors of different bits have another, nearly always.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> bool(checksum(one) == checksum(one.clone())), bool(checksum(one) == checksum(other))
        (True, False)
    """
    octets = tensor.detach().contiguous().view(torch.uint8).flatten()
    words = octets if octets.numel() % 4 else octets.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), BLOCK_ELEMENTS):
        block = words[start : start + BLOCK_ELEMENTS].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(block), device=block.device)
        total += (block * (places * 2654435761 % 2**31)).sum()
    return total


def compared_across(group: Group, tensors: Sequence[torch.Tensor | None]) -> list[str | None]:
    """For each tensor, `None` if every process of the group has it with the same bits, or what is wrong.

    `None` in place of a tensor says that this process has no such tensor. A DTensor is compared only in that every
    process has it, since each holds other rows. Every process of the group has to call this, and sends two numbers for
    each tensor.
    """
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    numbers = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    for row, tensor in zip(numbers, tensors, strict=True):
        row[1] = int(tensor is not None)
        if tensor is not None and not is_dtensor(tensor):
            row[0] = checksum(tensor)
    ends = torch.cat([numbers, -numbers])
    distributed.all_reduce(ends, op=distributed.ReduceOp.MAX, group=group)
    most, least = ends[: len(tensors)], -ends[len(tensors) :]
    found: list[str | None] = []
    for high, low in zip(most.tolist(), least.tolist(), strict=True):
        if low[1] == 0:
            found.append("is broken on some process" if high[1] else "is broken on every process")
        else:
            found.append(None if high[0] == low[0] else "differs between the processes")
    return found
