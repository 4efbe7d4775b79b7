"""The sizes that a recipe's scales depend on: the model's, and those of the matrix to draw."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from bowline.errors import BowlineError
from bowline.nn.config.live_config import owner
from bowline.nn.init.fused_matrices import Fused, output_axis
from bowline.nn.init.roles import Found
from bowline.nn.tree.slots import Slot
from bowline.recipes import Architecture, Role

__all__ = ["fans", "sizes_of"]

LAYERS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer")
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
HEAD_SIZES = ("head_dim", "head_size", "d_kv", "key_value_proj_dim")


def sizes_of(model: nn.Module, found: Found) -> dict[str, float]:
    """The sizes from the model's `Architecture`, or, for a family unknown there, from its matrices and config.

    A size that neither states is left out; a scale that needs it raises.
    """
    config = getattr(owner(model), "config", None)
    try:
        return Architecture.of(config).sizes
    except BowlineError:
        return _from_structure(model, config, found)


def _from_structure(model: nn.Module, config: Any, found: Found) -> dict[str, float]:
    first = _Firsts(found)
    sizes: dict[str, float | None] = {
        "hidden_size": first.reads(Role.QUERY) or first.reads(Role.FEED_FORWARD_IN) or first.hidden(),
        "embedding_size": first.reads(Role.INPUT_EMBEDDING),
        "attention_size": first.reads(Role.ATTENTION_OUT),
        "intermediate_size": first.reads(Role.FEED_FORWARD_OUT),
        "num_layers": _stated(config, LAYERS) or first.layers(),
    }
    slot, inner = first.slot(Role.ATTENTION_OUT), sizes["attention_size"]
    if slot is not None and inner:
        path = slot.name.removesuffix(slot.attribute).rstrip(".").rpartition(".")[0]
        above = [model.get_submodule(path), config]
        head_size = next((size for one in above if (size := _stated(one, HEAD_SIZES))), None)
        heads = next((count for one in above if (count := _stated(one, HEADS))), None)
        sizes["head_size"] = head_size or (inner / heads if heads else None)
    sizes["two_layers"] = 2 * sizes["num_layers"] if sizes["num_layers"] else None
    return {name: float(size) for name, size in sizes.items() if size}


def _stated(one: Any, names: tuple[str, ...]) -> float | None:
    found = (getattr(one, name, None) for name in names)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


class _Firsts:
    """The first matrix of each role."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.names: dict[Role, str] = {}
        for name, role in found.roles.items():
            for one in dict(role.parts) if isinstance(role, Fused) else (role,):
                self.names.setdefault(one, name)

    def slot(self, role: Role) -> Slot | None:
        name = self.names.get(role)
        return self.found.holders[name][0] if name is not None else None

    def reads(self, role: Role) -> float | None:
        slot = self.slot(role)
        return fans(self.found, slot.name, slot).get("fan_in") if slot is not None else None

    def hidden(self) -> float | None:
        """The width of a model without attention: a recurrent layer's, else the table's."""
        slot = self.slot(Role.RECURRENT)
        return getattr(slot.module, "hidden_size", None) if slot is not None else self.reads(Role.INPUT_EMBEDDING)

    def layers(self) -> float | None:
        """The number of layers of one kind in the last stack."""
        for role in (Role.FEED_FORWARD_OUT, Role.ATTENTION_OUT, Role.RECURRENT):
            names = [re.sub(r"\d+", "*", name) for name, one in self.found.roles.items() if one is role]
            if names:
                return names.count(names[-1])
        return None


def fans(found: Found, name: str, slot: Slot, outputs: int | None = None) -> dict[str, float]:
    """The fan-in and fan-out of a tensor's matrix; a bias has those of the matrix beside it.

    A table of tokens has those of the head that it is, or could be: its columns are the fan-in, its rows the fan-out.
    `outputs`: the fan-out of a part of the matrix.
    """
    weight = slot.tensor if slot.tensor.ndim > 1 else _matrix_beside(found, name, slot)
    if weight is None:
        return {}
    axis = output_axis(slot.module) if slot.tensor.ndim > 1 or slot.beside("weight") is weight else 0
    field = weight[0, 0].numel()
    reads, writes = weight.shape[1 - axis] * field, (outputs or weight.shape[axis]) * field
    return {"fan_in": float(reads), "fan_out": float(writes), "fan_avg": (reads + writes) / 2}


def _matrix_beside(found: Found, name: str, slot: Slot) -> torch.Tensor | None:
    """The weight to whose product a bias is added; for a head's bias, the head."""
    for held in found.holders[name]:
        for attribute in ("weight", "in_proj_weight", held.attribute.replace("bias_", "weight_")):
            beside = held.beside(attribute)
            if beside is not None and beside.ndim > 1:
                return beside
    if found.roles[name] is Role.HEAD_BIAS:
        head = next((name for name, role in found.roles.items() if role is Role.HEAD), found.table)
        return found.holders[head][0].tensor if head is not None else None
    return None
