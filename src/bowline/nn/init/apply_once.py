"""`Module.apply` for models with ties: each shared parameter is drawn once, by its source."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bowline.nn.ties.ends import there
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import Slot, slots

__all__ = ["apply_once"]


def apply_once(model: nn.Module, init: Callable[[nn.Module], object]) -> nn.Module:
    """`model.apply(init)`, but each shared parameter is drawn once, by its source's module.

    torch's `apply` visits every module, so a tied matrix is drawn twice and the head's draw, usually of another scale,
    is the one that stays. With this function, a target's module sees a stand-in without values (on meta) while `init`
    runs on it; its other parameters (a bias) are drawn as usual. If `init` assigns a source a new parameter, the tie is
    made again; an alias is drawn once as well, and stays an alias. Returns `model`.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> draw = {nn.Embedding: 1.0, nn.Linear: 0.0}
        >>> _ = apply_once(model, lambda m: type(m) in draw and nn.init.constant_(m.weight, draw[type(m)]))
        >>> model["wte"].weight.detach().unique()
        tensor([1.])
    """
    known = slots(model)
    found = find_ties(model)
    ties = [tie for tie in found if there(tie, known)]  # a quantised table's ends hold no parameter to draw
    whole = [tie for tie in found.aliases if known[tie.target].tensor.shape == known[tie.source].tensor.shape]
    borrowed: dict[nn.Module, list[Slot]] = {}
    for tie in (*ties, *whole):
        if not known[tie.target].same_place(known[tie.source]):  # a module under two names is visited once anyway
            borrowed.setdefault(known[tie.target].module, []).append(known[tie.target])

    def once(module: nn.Module) -> None:
        ends = borrowed.get(module, [])
        kept = [slot.tensor for slot in ends]
        for slot, tensor in zip(ends, kept, strict=True):
            slot.put(nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad))
        try:
            init(module)
        finally:
            for slot, tensor in zip(ends, kept, strict=True):
                slot.put(tensor)  # type: ignore[arg-type]

    try:
        return model.apply(once)
    finally:
        for tie in ties:
            known[tie.target].put(known[tie.source].tensor)  # type: ignore[arg-type]
