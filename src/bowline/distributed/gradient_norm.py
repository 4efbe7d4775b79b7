"""The norm of gradients of which some are spread over processes, and some over other processes than others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bowline.functional.row_shard import is_dtensor
from bowline.nn.tree.sharding import whole_tensor

__all__ = ["clip_by_norm", "gradient_norm"]


def gradient_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The norm () of the gradients; a DTensor counts as the whole tensor, on every process.

    Every process that has a part of a gradient has to call this. With `group`, the gradients of all its processes
    count together, and `device` is where they communicate. Parameters without a gradient do not count.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradient_norm([weight])
        tensor(5.)
    """
    largest = math.isinf(norm_type)
    norms = [whole_tensor(get_total_norm([_grad(each) for each in some], norm_type)) for some in _by_mesh(parameters)]
    if group is None and len(norms) == 1:
        return norms[0]
    place = device if device is not None else norms[0].device if norms else torch.device("cpu")
    wide = torch.float32 if place.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=place)
    for norm in norms:
        here = norm.to(device=place, dtype=wide)
        total = torch.maximum(total, here) if largest else total + here**norm_type
    if group is not None:
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(total, op=operation, group=group)
    total = total if largest else total ** (1.0 / norm_type)
    return total if any(norm.dtype == torch.float64 for norm in norms) else total.float()


def clip_by_norm(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scales the gradients in place so that `norm`, the norm of all of them, becomes at most `max_norm`."""
    for some in _by_mesh(parameters):
        clip_grads_with_norm_(some, max_norm, norm)


def _by_mesh(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters with gradients, in groups whose gradients are on one mesh, since torch mixes no others."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            groups.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(parameter)
    yield from groups.values()


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
