"""Updates records of a matrix after a tie changes: sizes that modules state, and transformers' list of ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.ends import holds
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.slots import Slot, slots

__all__ = ["fit_sizes", "stated_sizes", "tell_transformers"]

SIZES: dict[type[nn.Module], tuple[str, str]] = {
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.Linear: ("out_features", "in_features"),
}


def stated_sizes(end: Slot) -> dict[str, tuple[int, int]]:
    """The sizes that the slot's module states for its weight, each with the axis's true length."""
    if end.attribute != "weight" or not is_plain(end.tensor) or end.tensor.ndim != 2:
        return {}
    for kind, names in SIZES.items():
        if isinstance(end.module, kind):
            return {
                name: (getattr(end.module, name), length) for name, length in zip(names, end.tensor.shape, strict=True)
            }
    return {}


def fit_sizes(end: Slot) -> Callable[[], None]:
    """Set `out_features`, `num_embeddings` and their like to the weight's sizes; returns a function that undoes it."""
    before = {name: stated for name, (stated, true) in stated_sizes(end).items() if stated != true}
    for name, (_, true) in stated_sizes(end).items():
        setattr(end.module, name, true)

    def undo() -> None:
        for name, stated in before.items():
            setattr(end.module, name, stated)

    return undo


def tell_transformers(model: nn.Module) -> None:
    """Update each `all_tied_weights_keys`, by which transformers 5 saves and places a model, to the present ties."""
    for module in model.modules():
        listed: Any = module.__dict__.get("all_tied_weights_keys")
        if isinstance(listed, dict):
            known = slots(module)
            module.__dict__["all_tied_weights_keys"] = {
                tie.target: tie.source for tie in declared_ties(module, flag=True) if holds(tie, known)
            }
