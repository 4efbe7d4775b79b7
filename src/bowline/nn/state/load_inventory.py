"""Lists, before a load, a model's tensors and their places, and whether modules customise loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.slots import Slot, named_modules, occupied

__all__ = ["LoadInventory", "survey"]


@dataclass(frozen=True, slots=True)
class LoadInventory:
    """`tensors[name]` was in `slots[name]` when the model was walked, and `state` was its state dict.

    `own_rules`: modules translate the state that they load, by hooks or by custom methods. `plain`: every tensor
    is plain (`is_plain`), and the state dict has nothing else.
    """

    slots: Mapping[str, Slot]
    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    own_rules: bool
    plain: bool


def survey(model: nn.Module) -> LoadInventory:
    """Walk `model`, and build its state dict only if modules customise that."""
    named = named_modules(model)
    hanging = list(occupied(named))
    known = {slot.name: slot for slot, _ in hanging}
    tensors = {slot.name: tensor for slot, tensor in hanging}
    modules = [module for _, module in named]
    kinds = set(map(type, modules))
    state: Mapping[str, Any] = tensors
    if any(map(_saves_its_own_way, kinds)) or any(
        module._state_dict_hooks or module._state_dict_pre_hooks or "state_dict" in module.__dict__
        for module in modules
    ):
        state = model.state_dict(keep_vars=True)
    elif any(module._non_persistent_buffers_set for module in modules):
        state = {
            name: tensors[name]
            for name, slot in known.items()
            if slot.attribute not in slot.module._non_persistent_buffers_set
        }
    return LoadInventory(
        slots=known,
        tensors=tensors,
        state=state,
        own_rules=any(map(_loads_its_own_way, kinds))
        or any(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks for module in modules),
        plain=state.keys() <= tensors.keys() and all(map(is_plain, tensors.values())),
    )


def _saves_its_own_way(kind: type[nn.Module]) -> bool:
    ways = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return any(getattr(kind, way) is not getattr(nn.Module, way) for way in ways)


def _loads_its_own_way(kind: type[nn.Module]) -> bool:
    return kind._load_from_state_dict is not nn.Module._load_from_state_dict
