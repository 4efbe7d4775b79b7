"""Checks that live tensors are tied as declared, and that an optimizer treats each tie as one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from bowline.errors import TieError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.ties import optimizer_groups
from bowline.nn.ties.declared_ties import Ties, as_ties, declared_ties
from bowline.nn.ties.ends import holds
from bowline.nn.ties.module_sizes import stated_sizes
from bowline.nn.ties.tensor_comparison import difference, is_plain, state_of
from bowline.nn.ties.tie_report import Remark, TieCheck, TieReport
from bowline.nn.tree.sharding import fsdp_records, placed_alike, placement_of
from bowline.nn.tree.slots import Slot, slot
from bowline.nn.tree.table_slots import TableSlot, is_head, tie_ends
from bowline.tie import Tie, TieState

__all__ = ["check_ties"]


def check_ties(model: nn.Module, ties: Ties | None = None, *, optimizer: Optimizer | None = None) -> TieReport:
    """The state of each tie: shared, an alias, a clone, diverged (in how many rows, by how much), or impossible.

    `ties` are the declared ones (`declared_ties`), and those that hold although the flag says no, unless they are
    given. Beside the state a check remarks on sizes and biases that no longer fit, parametrizations on either side,
    what freezing one end did to the other, a flag that contradicts; and, given an `optimizer`, on parameters of the tie
    that are stale (no longer the model's), missing or listed twice, and on weight decay that the two ends would have
    wanted differently. Of sharded ends (DTensors, modules that `fully_shard` wrapped) it states each one's placement,
    and whether FSDP2 keeps the two as one parameter. Nothing is changed, and only `.raise_if_broken()` raises.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = nn.Parameter(model["wte"].weight.detach())
        >>> print(check_ties(model, [("lm_head.weight", "wte.weight")]).checks[0].state)
        ALIAS
    """
    known = tie_ends(model)
    declared = declared_ties(model, known=known)
    denied = set(declared_ties(model, flag=True, known=known)) - set(declared)
    if ties is None:
        against = (tie for tie in denied if holds(tie, known))
        wanted = tuple({tie.target: tie for tie in (*declared, *sorted(against))}.values())
    else:
        wanted = as_ties(ties)
    listed = None if optimizer is None else _Listed(known, optimizer)
    records = fsdp_records(model)
    checks = tuple(_check(model, tie, known, listed, records, tie in denied) for tie in wanted)
    return TieReport(checks=checks)


def _check(
    model: nn.Module,
    tie: Tie,
    known: dict[str, Slot],
    listed: _Listed | None,
    records: Mapping[tuple[nn.Module, str], int],
    denied: bool,
) -> TieCheck:
    target, source = known.get(tie.target), known.get(tie.source)
    if target is None or source is None:
        state = (
            TieState.BOTH_MISSING
            if target is source
            else TieState.TARGET_MISSING
            if target is None
            else TieState.SOURCE_MISSING
        )
        gone = [name for name, end in ((tie.target, target), (tie.source, source)) if end is None]
        return TieCheck(tie=tie, state=state, remarks=tuple(_why_missing(model, name, known) for name in gone))
    a, b = target.tensor, source.tensor
    if isinstance(target, TableSlot) and isinstance(source, TableSlot) and a is not b:
        a, b = target.end.weight, source.end.weight  # two tables, whose codes mean nothing without their scales
    state = state_of(a, b)
    apart = difference(a, b) if state is TieState.DIVERGED else None
    remarks = [*_structure(target, source), *_sharding(target, source, records), *_freezing(model, target, source)]
    if denied and state is TieState.SHARED:
        remarks.append(_against_the_flag(tie))
    if listed is not None:
        remarks += _in_optimizer(known, target, source, listed)
    return TieCheck(tie=tie, state=state, difference=apart, remarks=tuple(remarks))


def _why_missing(model: nn.Module, name: str, known: dict[str, Slot]) -> Remark:
    path, _, attribute = name.rpartition(".")
    try:
        kind = "parametrized" if parametrize.is_parametrized(model.get_submodule(path), attribute) else "missing_tensor"
    except AttributeError:
        kind = "missing_tensor"
    try:
        slot(model, name, known)
    except TieError as error:
        return Remark(kind=kind, message=error.message, help=error.help or "", breaks=True)
    raise AssertionError(name)


def _structure(target: Slot, source: Slot) -> Iterator[Remark]:
    """Remarks on buffers, sizes and biases."""
    for end in (target, source):
        if not end.is_parameter and not isinstance(end, TableSlot):
            yield Remark(
                kind="not_a_parameter",
                message=f"{end.name} is a buffer, expected a parameter",
                help="register it as a torch.nn.Parameter",
                breaks=True,
            )
        for name, (stated, true) in stated_sizes(end).items():
            if stated != true:
                yield Remark(
                    kind="size",
                    message=f"the module of {end.name} states {name}={stated}, but the weight has {true}",
                    help="the module computes the same; tie_weights and resize_vocab keep this size correct",
                    breaks=False,
                )
        bias = end.beside("bias")
        is_weight = is_head(end.module) and end.attribute == "weight"
        if is_weight and bias is not None and is_plain(end.tensor) and len(bias) != len(end.tensor):
            yield Remark(
                kind="bias",
                message=f"{end.name} has {len(end.tensor)} rows, but its bias has {len(bias)} entries",
                help="resize_vocab resizes both",
                breaks=True,
            )


def _sharding(target: Slot, source: Slot, records: Mapping[tuple[nn.Module, str], int]) -> Iterator[Remark]:
    """Remarks on how the processes of a mesh hold the two ends."""
    kept = [records.get((end.module, end.attribute)) for end in (target, source)]
    if kept[0] != kept[1]:
        yield Remark(
            kind="sharding",
            message=f"fully_shard keeps {target.name} and {source.name} as two parameters: they were wrapped "
            "separately, or tied after they were sharded; where the rows do not divide evenly by the processes, the "
            "training is silently wrong",
            help="tie first, then: for group in bowline.shard_groups(model): fully_shard(group, mesh=mesh)",
            breaks=True,
        )
    if not (is_dtensor(target.tensor) or is_dtensor(source.tensor)):
        return
    placements = [placement_of(end.tensor) for end in (target, source)]
    alike = placed_alike(target.tensor, source.tensor)
    yield Remark(
        kind="placement",
        message=f"both ends are {placements[0]}"
        if alike
        else f"{target.name} is {placements[0]}, but {source.name} is {placements[1]}",
        help="nothing to do"
        if alike
        else "shard both ends alike: bowline.tensor_parallel_plan(model) gives such a plan",
        breaks=not alike,
    )


def _against_the_flag(tie: Tie) -> Remark:
    """Remarks on ties that hold although the config denies them: a save by one and a load by the other lose an end."""
    return Remark(
        kind="flag",
        message=f"{tie.target} is tied, but the config says that it is not: transformers' save_pretrained omits it, "
        "and a load then initialises it at random",
        help="save_checkpoint writes a config that agrees with the tensors; tie_weights(model) or untie_weights(model) "
        "makes the model and its config agree",
        breaks=False,
    )


def _freezing(model: nn.Module, target: Slot, source: Slot) -> Iterator[Remark]:
    if isinstance(target, TableSlot) and isinstance(source, TableSlot):
        return
    if target.tensor is source.tensor and not target.tensor.requires_grad:
        others = (p for p in model.parameters() if p is not target.tensor)
        if any(p.requires_grad for p in others):
            yield Remark(
                kind="frozen",
                message=f"freezing {target.name} freezes {source.name}: they are one parameter",
                help="to freeze one end only, call untie_weights(model) first",
                breaks=False,
            )
    elif target.tensor.requires_grad != source.tensor.requires_grad:
        frozen = source if target.tensor.requires_grad else target
        yield Remark(
            kind="frozen",
            message=f"only {frozen.name} is frozen; once tied, both ends are frozen or neither is",
            help="give both ends the same requires_grad before tying",
            breaks=False,
        )


class _Listed:
    """The parameters of an optimizer: how often it lists each, and which of them the model does not have."""

    def __init__(self, known: dict[str, Slot], optimizer: Optimizer) -> None:
        optimizer_groups.expect_groups(optimizer)
        self.optimizer = optimizer
        live = {id(end.tensor) for end in known.values()}
        self.counts: dict[int, int] = {}
        self.foreign: list[tuple[int, torch.Size]] = []
        for at, parameter in optimizer_groups.held(optimizer):
            self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
            if id(parameter) not in live:
                self.foreign.append((at, parameter.shape))


def _in_optimizer(known: dict[str, Slot], target: Slot, source: Slot, listed: _Listed) -> Iterator[Remark]:
    ends = {id(end.tensor): end for end in (target, source)}
    counts = listed.counts
    alike = [at for at, shape in listed.foreign if shape == source.tensor.shape]
    lost = any(key not in counts and end.tensor.requires_grad for key, end in ends.items())
    for at in alike:
        # Parameters of other shapes belong to another model that this optimizer trains too; these may as well.
        certain = lost or len(alike) == len(listed.foreign)
        yield Remark(
            kind="stale",
            message=f"group {at} of the optimizer holds a {tuple(source.tensor.shape)} parameter that the model "
            f"{'no longer has: its steps have no effect' if certain else 'does not have; another model may have it'}",
            help="build the optimizer after tying and loading, or pass it to tie_weights",
            breaks=certain,
        )
    for key, end in ends.items():
        if key not in counts and end.tensor.requires_grad:
            yield Remark(
                kind="missing",
                message=f"the optimizer does not hold {end.name}, so it does not train that parameter",
                help="build the optimizer after tying and loading, or pass it to tie_weights",
                breaks=True,
            )
        elif counts.get(key, 0) > 1:
            yield Remark(
                kind="duplicate",
                message=f"the optimizer holds {end.name} {counts[key]} times, so each step updates it {counts[key]} "
                "times",
                help="pass model.parameters(), which lists a shared parameter once",
                breaks=True,
            )
    if len(ends) == 1:
        yield from _weight_decay(known, source, listed.optimizer)


def _weight_decay(known: dict[str, Slot], shared: Slot, optimizer: Optimizer) -> Iterator[Remark]:
    """Remarks on weight decay, if the groups treat other embeddings and other matrices differently."""
    kinds = {id(end.tensor): type(end.module) for end in known.values() if end.tensor.ndim > 1}
    decay: dict[bool, set[float]] = {True: set(), False: set()}
    own: float | None = None
    for group in optimizer.param_groups:
        rate = group.get("weight_decay", 0.0)
        for parameter in group["params"]:
            if parameter is shared.tensor:
                own = rate
            elif id(parameter) in kinds:
                decay[issubclass(kinds[id(parameter)], nn.Embedding)].add(rate)
    if own is None or shared.tensor.ndim < 2 or not all(len(rates) == 1 for rates in decay.values()):
        return
    embeddings, matrices = decay[True].pop(), decay[False].pop()
    if embeddings != matrices:
        yield Remark(
            kind="weight_decay",
            message=f"weight decay is {embeddings} for the other embeddings and {matrices} for the other matrices; "
            f"{shared.name}, which is both, has {own}",
            help="choose one value for the shared matrix: one parameter is in one group",
            breaks=False,
        )
