"""Keeps an optimizer's groups and state correct when a tie is made, undone or resized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.errors import TieError, UsageError

__all__ = ["copy_state", "drop", "expect", "expect_groups", "group_of", "held", "replace", "resize_state"]

Group = dict[str, Any]
POWERS = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "square_avg": 2, "sum": 2}
"""Moments of the gradient by torch's names, with the order of each."""


def expect(optimizer: object) -> None:
    """Raise, before anything is changed, if this optimizer's parameters cannot be replaced.

    Raises:
        UsageError: it has no groups and no state by parameter.
        TieError: its state spans parameters (LBFGS), or parts of it are on other processes (ZeRO).
    """
    expect_groups(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "_partition_parameters"):
        raise TieError(
            f"optimizer: {type(optimizer).__name__} does not keep its state per parameter, so none of its "
            "parameters can be replaced",
            help="leave out optimizer=, and build a new optimizer afterwards",
            argument="optimizer",
        )


def expect_groups(optimizer: object) -> None:
    """Raise a `UsageError` if this is not an optimizer: no groups of parameters, or no state."""
    if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "state"):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer", argument="optimizer"
        )


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Group | None:
    """The group that holds `parameter` (by identity), or `None`."""
    return next((group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None)


def replace(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace `old` by `new`, with its state; if `new` is in the optimizer already, only remove `old`."""
    if old is new:
        return
    if group_of(optimizer, new) is not None:
        drop(optimizer, old)
        return
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def drop(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Remove `parameter` and its state."""
    for group in optimizer.param_groups:
        kept = [at for at, p in enumerate(group["params"]) if p is not parameter]
        for key in {"params", "param_names"} & set(group):  # names exist if named_parameters() were given
            group[key][:] = [group[key][at] for at in kept]
    optimizer.state.pop(parameter, None)


def copy_state(optimizer: Optimizer, source: torch.Tensor, new: torch.Tensor, name: str, scale: float = 1.0) -> None:
    """Add `new`, called `name`, to the group of `source`, with a copy of its state, for an untied head.

    If it is `scale` times the source, its gradient is 1 / `scale` times the source's, and so are the moments.
    """
    group = group_of(optimizer, source)
    if group is None or group_of(optimizer, new) is not None:
        return
    group["params"].append(new)
    if "param_names" in group:
        group["param_names"].append(name)
    if source in optimizer.state:
        optimizer.state[new] = {
            key: value / scale ** POWERS[key] if key in POWERS else copy.deepcopy(value)
            for key, value in optimizer.state[source].items()
        }


def resize_state(
    optimizer: Optimizer, parameter: nn.Parameter, shape: torch.Size, resize: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Apply `resize` to each state tensor that had the parameter's old `shape` (moments; not step counters)."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            state[key] = resize(value)


def held(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Every parameter of the optimizer, with its group's number."""
    for at, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield at, parameter
