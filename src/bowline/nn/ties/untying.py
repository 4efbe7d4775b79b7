"""Undoes ties: each end gets its own matrix, and nothing trained is lost."""

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
from bowline.nn.config.head_scaling import follows_flag, head_scale, set_scaling, undo_scaling
from bowline.nn.config.live_config import flag_is_forced, owner, restore, set_flag
from bowline.nn.ties import optimizer_groups
from bowline.nn.ties.declared_ties import Ties, as_ties, declared_ties
from bowline.nn.ties.ends import holds, is_alias, makes_logits, there
from bowline.nn.ties.float_tables import tables_to_float
from bowline.nn.ties.module_sizes import tell_transformers
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tensor_comparison import is_plain, kind_of
from bowline.nn.tree.slots import Slot, slot, slots
from bowline.nn.tree.table_slots import is_lookup, table_slots, tie_ends
from bowline.nn.tree.wrappers import refuse_wrapped
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
    `scale_decoder_outputs` becomes false: the form of T5 v1.1, which every version of transformers reads alike. Its
    moments in `optimizer` are divided by the factor, as its gradient is from now on. Its rate stays the group's: to go
    on with the same steps of logits AdamW needs the factor times that (`bowline.train.Trainer` sees to it).

    A table that `quantize_tied` made is converted back to float first, at each of its ends. The ends that no given tie
    names stay tied, in float.

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
        raise UsageError(
            f"head={head!r}: expected 'copy' or a function that initialises a tensor in place", argument="head"
        )
    refuse_wrapped(model)
    if optimizer is not None:
        optimizer_groups.expect(optimizer)
    undone = _holding(model) if ties is None else _checked(model, as_ties(ties))
    if not table_slots(model):
        return _untie(model, undone, head, optimizer)
    with ExitStack() as undo:
        tables_to_float(model, undone, undo)
        _untie(model, undone, head, optimizer)
        undo.pop_all()
    return undone


def _untie(model: nn.Module, undone: tuple[Tie, ...], head: Head, optimizer: Optimizer | None) -> tuple[Tie, ...]:
    declared = declared_ties(model, flag=True)
    known = slots(model)
    heads = [tie for tie in declared if there(tie, known) and makes_logits(known[tie.target], known[tie.source])]
    if not undone and not heads:
        return ()
    scale = head_scale(model) if heads else 1.0
    staying = [tie for tie in heads if tie not in undone and holds(tie, known)]
    if staying and scale != 1.0:
        if follows_flag(model) and set(undone) & set(declared):
            raise TieError(
                f"{staying[0]}: would stay tied but lose its scale of {scale:.3g}, because untying clears the flag "
                "that turns it on",
                help="untie the head as well",
            )
        scale = 1.0  # the model itself keeps scaling
    apart = [tie for tie in heads if not holds(tie, known)] if follows_flag(model) else []
    separate(model, undone, head=head, scale=scale, optimizer=optimizer)
    for tie in apart:  # an untied head whose input has been scaled until now
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
    """Give each target its own `Parameter`, times `scale` for the head, and clear the flag."""
    known = slots(model)
    fresh = {tie: _fresh(known[tie.target], known[tie.source], head, scale) for tie in ties}
    before = {tie: (known[tie.source].tensor, known[tie.target].tensor) for tie in ties}
    with ExitStack() as undo:
        now = known
        for tie, parameter in fresh.items():
            shared = now[tie.target].same_place(now[tie.source])
            _hang_alone(model, now[tie.target], now[tie.source], parameter, undo)
            if shared:  # another module has taken its place
                now = slots(model)
        if not all(holds(tie, now) for tie in declared_ties(model, flag=True)):
            undo.callback(restore, set_flag(model, False))
        if scale != 1.0:
            undo.callback(undo_scaling, set_scaling(model, False))
        undo.pop_all()
    if optimizer is not None:
        for tie, parameter in fresh.items():
            source, target = before[tie]
            if target is not source:  # an alias, which the optimizer may hold separately
                optimizer_groups.replace(optimizer, target, parameter)
            scaled = scale if head == "copy" and makes_logits(known[tie.target], known[tie.source]) else 1.0
            optimizer_groups.copy_state(optimizer, source, parameter, tie.target, scaled)
    tell_transformers(model)


def _holding(model: nn.Module) -> tuple[Tie, ...]:
    """The declared ties that hold and that end with the flag; where none are declared, a head's to an embedding."""
    known = tie_ends(model)
    declared = [tie for tie in declared_ties(model, flag=True) if there(tie, known)]
    if declared:
        only_heads = flag_is_forced(getattr(owner(model), "config", None))
    else:
        found = find_ties(model)
        declared = [tie for tie in (*found, *found.aliases) if is_lookup(known[tie.source].module)]
        only_heads = True
    heads = {id(known[tie.target].module) for tie in declared if makes_logits(known[tie.target], known[tie.source])}
    return tuple(
        tie
        for tie in declared
        if (holds(tie, known) or is_alias(tie, known))
        and not (only_heads and id(known[tie.target].module) not in heads)
    )


def _checked(model: nn.Module, ties: tuple[Tie, ...]) -> tuple[Tie, ...]:
    known = tie_ends(model)
    for tie in ties:
        slot(model, tie.target, known), slot(model, tie.source, known)
        if not holds(tie, known) and not is_alias(tie, known):
            raise TieError(
                f"{tie}: the two ends are not one parameter, so there is nothing to untie",
                help="find_ties(model) lists what is shared",
            )
    return ties


def _fresh(target: Slot, source: Slot, head: Head, scale: float) -> nn.Parameter:
    if not is_plain(source.tensor):
        raise TieError(
            f"{target.name} <- {source.name}: {source.name} is {kind_of(source.tensor)}, expected a plain dense "
            "parameter",
            help="untie before quantising or sharding",
        )
    is_head = makes_logits(target, source)
    with torch.no_grad():
        own = source.tensor.detach().clone()
        if is_head and callable(head):
            drawn = head(own)
            if isinstance(drawn, torch.Tensor) and drawn is not own:
                raise UsageError(
                    "head: the function returned a new tensor, expected it to initialise the given one in place",
                    help="give a function of torch.nn.init, such as torch.nn.init.xavier_uniform_",
                    argument="head",
                )
        elif is_head and scale != 1.0:
            own.mul_(scale)
    parameter = nn.Parameter(own, requires_grad=source.tensor.requires_grad)
    parameter.__dict__.update(source.tensor.__dict__)  # what people hang on a parameter, such as _no_weight_decay
    return parameter


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
