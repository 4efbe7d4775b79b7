"""Tries a load on a copy of the model without values, when modules customise loading and only they know what fits."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bowline.errors import CheckpointError

__all__ = ["rehearse"]


def rehearse(
    model: nn.Module, held: Iterable[torch.Tensor], state: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names that torch and the modules will find missing and unexpected; `None` if no copy can be made.

    `held`: the model's parameters and buffers.

    Raises:
        CheckpointError: torch, a module or a hook would raise half-way.
    """
    tensors = {id(tensor): tensor for tensor in held}
    try:
        twin = copy.deepcopy(model, {key: _without_values(tensor) for key, tensor in tensors.items()})
    except Exception:  # an uncopyable lock, file or process group is not a reason to refuse a load
        return None
    ghost = OrderedDict(
        (name, torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else copy.copy(value))
        for name, value in state.items()
    )
    if hasattr(state, "_metadata"):
        ghost._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    try:
        found = type(twin).load_state_dict(twin, ghost, strict=False, assign=True)
    except Exception as error:
        raise CheckpointError(
            f"the state does not fit the model: {' '.join(str(error).split())}",
            help="build the model from the checkpoint's config, or resize_vocab(model, ...) first",
        ) from error
    return tuple(found.missing_keys), tuple(found.unexpected_keys)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return copy.deepcopy(tensor)
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
