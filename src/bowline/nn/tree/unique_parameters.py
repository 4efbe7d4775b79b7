"""Lists each parameter once: optimizers and gradient norms need one of the tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.tree.storages import knots, overlap, overlapping

__all__ = ["unique_parameters"]


def unique_parameters(parameters: Iterable[torch.Tensor] | torch.Tensor | nn.Module) -> Iterator[torch.Tensor]:
    """Each parameter once, as an optimizer needs them; of those that overlap in memory, the widest, or the first.

    `torch.nn.utils.clip_grad_norm_` counts a parameter that is listed twice twice, and SGD steps it twice.

    Example:
        >>> table = nn.Parameter(torch.ones(3, 2))
        >>> len(list(unique_parameters([table, table, nn.Parameter(table.detach())])))
        1
    """
    if isinstance(parameters, torch.Tensor):  # iterating over a tensor would give its rows
        parameters = [parameters]
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    given = list(given)
    for parameter in given:
        if not isinstance(parameter, torch.Tensor):
            raise UsageError(
                f"parameters contains a {type(parameter).__name__}, expected parameters",
                help="pass model.parameters(), or the 'params' of each group",
                argument="parameters",
            )
    distinct = list({id(parameter): parameter for parameter in given}.values())
    again: set[int] = set()
    for knot in knots(overlapping(list(enumerate(distinct)))):
        kept: list[torch.Tensor] = []
        for at in sorted(knot, key=lambda at: (-distinct[at].numel(), at)):
            if any(overlap(distinct[at], other) for other in kept):
                again.add(at)
            else:
                kept.append(distinct[at])
    return (parameter for at, parameter in enumerate(distinct) if at not in again)
