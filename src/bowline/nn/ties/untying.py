"""Undoing ties: each end gets a matrix of its own, and nothing that was trained is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.errors import TieError, UsageError
from bowline.nn import optimizers
from bowline.nn.config import restore, set_flag
from bowline.nn.scaling import scale_of_flag
from bowline.nn.slots import Slot, slot, slots
from bowline.nn.ties.compare import is_plain
from bowline.nn.ties.declared import Ties, as_ties, declared_ties
from bowline.nn.ties.find import find_ties
from bowline.nn.ties.told import tell_transformers
from bowline.tie import Tie

__all__ = ["Head", "untie_weights"]

Head: TypeAlias = Literal["copy"] | Callable[[torch.Tensor], Any]
"""`"copy"`, or a function that draws a fresh head in place, such as `torch.nn.init.xavier_uniform_`."""


def untie_weights(
    model: nn.Module, ties: Ties | None = None, *, head: Head = "copy", optimizer: Optimizer | None = None
) -> tuple[Tie, ...]:
    """Give each tie's target a `Parameter` of its own; returns the ties that were undone.

    `ties` are those that the model's classes declare and that hold now (where none are declared, those found on an
    embedding), unless they are given. A target becomes a copy of its source, bias ties included, so the model computes
    what it did. A callable `head` draws the output head afresh instead; biases and the tables of an encoder and a
    decoder are copied even then. `tie_word_embeddings` becomes false at every level of every config that states it.
    In `optimizer` the new parameter joins its source's group with a copy of its state.

    Where the flag also scales the decoder's output (transformers 4's T5, for one), the copied head takes the factor
    d_model^-1/2 upon itself.

    Raises:
        TieError: an unknown name, or a tie whose ends are not shared; the model is as it was.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> untie_weights(model)
        (Tie(target='lm_head.weight', source='wte.weight'),)
        >>> torch.equal(model["lm_head"].weight, model["wte"].weight)
        True
    """
    if head != "copy" and not callable(head):
        raise UsageError(f"head={head!r}: expected 'copy' or a function that draws a tensor in place")
    declared = set(declared_ties(model, flag=True))
    undone = _holding(model) if ties is None else _checked(model, as_ties(ties))
    scale = scale_of_flag(model) if declared & set(undone) else 1.0
    known = slots(model)
    fresh = {tie: _fresh(known[tie.target], known[tie.source].tensor, head, scale) for tie in undone}
    with ExitStack() as undo:
        for tie, parameter in fresh.items():
            source = known[tie.source].tensor
            _hang_alone(model, known[tie.target], known[tie.source], parameter, undo)
            if optimizer is not None:
                optimizers.copy_state(optimizer, source, parameter)
        if declared:
            undo.callback(restore, set_flag(model, False))
        undo.pop_all()
    tell_transformers(model)
    return undone


def _holding(model: nn.Module) -> tuple[Tie, ...]:
    """The declared ties that hold; where nothing is declared, the ties on an embedding."""
    known = slots(model)
    declared = declared_ties(model, flag=True)
    if declared:
        return tuple(
            tie
            for tie in declared
            if tie.target in known and tie.source in known and known[tie.target].tensor is known[tie.source].tensor
        )
    return tuple(tie for tie in find_ties(model) if isinstance(known[tie.source].module, nn.Embedding))


def _checked(model: nn.Module, ties: tuple[Tie, ...]) -> tuple[Tie, ...]:
    known = slots(model)
    for tie in ties:
        if slot(model, tie.target, known).tensor is not slot(model, tie.source, known).tensor:
            raise TieError(
                f"{tie}: the two ends are not one parameter, so there is nothing to untie",
                help="find_ties(model) lists what is shared",
            )
    return ties


def _fresh(target: Slot, source: torch.Tensor, head: Head, scale: float) -> nn.Parameter:
    is_head = source.ndim > 1 and not isinstance(target.module, nn.Embedding)
    with torch.no_grad():
        own = source.detach().clone()
        if is_head and callable(head):
            head(own)
        elif is_head and scale != 1.0 and is_plain(own):
            own.mul_(scale)
    return nn.Parameter(own, requires_grad=source.requires_grad)


def _hang_alone(model: nn.Module, target: Slot, source: Slot, parameter: nn.Parameter, undo: ExitStack) -> None:
    """Put `parameter` at the target; where both ends are one module, the target gets a module of its own first."""
    if target.same_place(source):
        path, _, name = target.name.removesuffix("." + target.attribute).rpartition(".")
        parent = model.get_submodule(path)
        module = copy.copy(target.module)
        for home in ("_parameters", "_buffers", "_modules"):
            module.__dict__[home] = dict(module.__dict__[home])
        undo.callback(parent._modules.__setitem__, name, target.module)
        parent._modules[name] = module
        target = Slot(target.name, module, target.attribute)
    else:
        undo.callback(target.put, target.tensor)  # type: ignore[arg-type]
    target.put(parameter)
