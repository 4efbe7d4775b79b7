"""Undoing ties: each end gets a matrix of its own, and nothing that was trained is lost."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.errors import TieError, UsageError
from bowline.nn import optimizers
from bowline.nn.config import flag_is_forced, restore, set_flag
from bowline.nn.scaling import follows_flag, head_scale, set_scaling, undo_scaling
from bowline.nn.slots import Slot, slot, slots
from bowline.nn.ties.compare import is_plain
from bowline.nn.ties.declared import Ties, as_ties, declared_ties
from bowline.nn.ties.find import find_ties
from bowline.nn.ties.told import holds, tell_transformers
from bowline.tie import Tie

__all__ = ["Head", "separate", "untie_weights"]

Head: TypeAlias = Literal["copy"] | Callable[[torch.Tensor], Any]
"""`"copy"`, or a function that draws a fresh head in place, such as `torch.nn.init.xavier_uniform_`."""


def untie_weights(
    model: nn.Module, ties: Ties | None = None, *, head: Head = "copy", optimizer: Optimizer | None = None
) -> tuple[Tie, ...]:
    """Give each tie's target a `Parameter` of its own; returns the ties that were undone.

    `ties` are those that the model's classes declare, that hold now and that end with the flag, unless they are given
    (the tables of a T5's encoder and decoder do not end: its config forces the flag). Where none are declared, they are
    those of a head to an embedding. A target becomes a copy of its source, bias ties included, so the model computes
    what it did; a callable `head` draws the output head's matrix afresh instead. `tie_word_embeddings` becomes false at
    every level of every config that states it. In `optimizer` the new parameter joins its source's group with a copy
    of its state.

    Where the flag also scales the decoder's output (T5), the copied head takes the factor d_model^-1/2 upon itself, and
    `scale_decoder_outputs` becomes false: the form of T5 v1.1, which every version of transformers reads alike.

    Raises:
        TieError: an unknown name, a tie whose ends are not shared, or a table's tie without the head's where the flag
            scales; the model is as it was.

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
    undone = _holding(model) if ties is None else _checked(model, as_ties(ties))
    declared = declared_ties(model, flag=True)
    heads = [tie for tie in declared if _is_head(model, tie)]
    if not undone and not heads:
        return ()
    scale = head_scale(model) if heads else 1.0
    known = slots(model)
    staying = [tie for tie in heads if tie not in undone and holds(tie, known)]
    if staying and scale != 1.0:
        if follows_flag(model) and set(undone) & set(declared):
            raise TieError(
                f"{staying[0]}: would stay tied, and lose the scale {scale:.3g} that goes with the flag",
                help="untie the head as well",
            )
        scale = 1.0  # what still scales is the model
    apart = [tie for tie in heads if not holds(tie, known)] if follows_flag(model) else []
    separate(model, undone, head=head, scale=scale, optimizer=optimizer)
    for tie in apart:  # a head of its own already, and scaled until now
        with torch.no_grad():
            slots(model)[tie.target].tensor.mul_(scale)
    return undone


def separate(
    model: nn.Module,
    ties: tuple[Tie, ...],
    *,
    head: Head = "copy",
    scale: float = 1.0,
    optimizer: Optimizer | None = None,
) -> None:
    """Give each target a `Parameter` of its own, times `scale` where it is the head's, and clear the flag."""
    known = slots(model)
    fresh = {tie: _fresh(known[tie.target], known[tie.source], head, scale) for tie in ties}
    with ExitStack() as undo:
        for tie, parameter in fresh.items():
            now = slots(model)  # untying a shared module puts another in its place
            _hang_alone(model, now[tie.target], now[tie.source], parameter, undo)
        now = slots(model)
        if not all(holds(tie, now) for tie in declared_ties(model, flag=True)):
            undo.callback(restore, set_flag(model, False))
        if scale != 1.0:
            undo.callback(undo_scaling, set_scaling(model, False))
        undo.pop_all()
    if optimizer is not None:
        for tie, parameter in fresh.items():
            optimizers.copy_state(optimizer, known[tie.source].tensor, parameter, tie.target)
    tell_transformers(model)


def _holding(model: nn.Module) -> tuple[Tie, ...]:
    """The declared ties that hold and that end with the flag; where none are declared, a head's to an embedding."""
    known = slots(model)
    declared = [tie for tie in declared_ties(model, flag=True) if tie.target in known and tie.source in known]
    if declared:
        only_heads = flag_is_forced(getattr(model, "config", None))
    else:
        declared = [tie for tie in find_ties(model) if isinstance(known[tie.source].module, nn.Embedding)]
        only_heads = True
    heads = {id(known[tie.target].module) for tie in declared if _makes_logits(known[tie.target], known[tie.source])}
    return tuple(
        tie for tie in declared if holds(tie, known) and not (only_heads and id(known[tie.target].module) not in heads)
    )


def _checked(model: nn.Module, ties: tuple[Tie, ...]) -> tuple[Tie, ...]:
    known = slots(model)
    for tie in ties:
        if slot(model, tie.target, known).tensor is not slot(model, tie.source, known).tensor:
            raise TieError(
                f"{tie}: the two ends are not one parameter, so there is nothing to untie",
                help="find_ties(model) lists what is shared",
            )
    return ties


def _fresh(target: Slot, source: Slot, head: Head, scale: float) -> nn.Parameter:
    is_head = _makes_logits(target, source)
    with torch.no_grad():
        own = source.tensor.detach().clone()
        if is_head and callable(head):
            head(own)
        elif is_head and scale != 1.0 and is_plain(own):
            own.mul_(scale)
    return nn.Parameter(own, requires_grad=source.tensor.requires_grad)


def _hang_alone(model: nn.Module, target: Slot, source: Slot, parameter: nn.Parameter, undo: ExitStack) -> None:
    """Put `parameter` at the target; where both ends are one module, the target gets a module of its own first."""
    if target.same_place(source):
        target = _on_its_own(model, target, undo)
    else:
        undo.callback(target.put, target.tensor)  # type: ignore[arg-type]
    target.put(parameter)


def _on_its_own(model: nn.Module, target: Slot, undo: ExitStack) -> Slot:
    """The target in a copy of its module, and of each module above it from the first that hangs under two names."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    parent, shared = model, False
    for part in target.name.removesuffix("." + target.attribute).split("."):
        module = parent._modules[part]
        assert module is not None
        shared = shared or names[id(module)] > 1
        if shared:
            undo.callback(parent._modules.__setitem__, part, module)
            module = parent._modules[part] = copy.copy(module)
            for home in ("_parameters", "_buffers", "_modules"):
                module.__dict__[home] = dict(module.__dict__[home])
        parent = module
    return Slot(target.name, parent, target.attribute)


def _is_head(model: nn.Module, tie: Tie) -> bool:
    known = slots(model)
    return tie.target in known and tie.source in known and _makes_logits(known[tie.target], known[tie.source])


def _makes_logits(target: Slot, source: Slot) -> bool:
    """A matrix that is not looked up in: the output head, and not another table, a bias, or a second such layer.

    Two layers of one kind (the convolutions of UDOP, the repeated heads of a DETR) are no embedding and its head.
    """
    alike = isinstance(target.module, nn.Embedding) or type(target.module) is type(source.module)
    return target.tensor.ndim == 2 and not alike
