"""Checks a model and what it is about to be sharded by, on every process, before the first step goes silently wrong."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import distributed, nn
from torch.optim import Optimizer

from bowline.errors import TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.ties import optimizer_groups
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tie_check import check_ties
from bowline.nn.tree.slots import Slot, expect_module, slots
from bowline.tie import Tie

__all__ = ["check_before_sharding"]

Fault = tuple[str, str]
"""A message (what was seen and expected), and the line of code that mends the fault."""
BY_GROUPS = "for group in bowline.shard_groups(model): fully_shard(group, mesh=mesh)"
BY_ROWS, BY_COLUMNS = "its rows", "its columns"


def check_before_sharding(model: nn.Module, plan_or_mesh: Any = None, optimizer: Optimizer | None = None) -> None:
    """Raises, before a model is sharded, if its ties would break by that or be silently wrong; otherwise does nothing.

    Args:
        model: whole as yet. One that is sharded already is checked for ends that FSDP2 keeps as two parameters.
        plan_or_mesh: a `DeviceMesh`; or a list of the modules, or of the lists of modules, for each `fully_shard`; or a
            plan for `parallelize_module`, or of transformers' `tp_plan`; or transformers' `DistributedConfig`.
        optimizer: the optimizer, if there is one already.

    It finds declared ties that do not hold or are aliases, ends in separate groups, plans that shard one end only or
    the ends along different axes or that name no module, a vocabulary with fewer rows than processes, an optimizer
    built before its parameters are replaced, and `DistributedConfig(fsdp_size=n)` with a vocabulary that n does not
    divide or with stages (transformers 5.23 trains such a model wrongly). Where a process group exists, every process
    has to call it: the processes' ties and shapes are compared, and a fault of one is raised on all.

    Raises:
        TieError: everything that was found, each with the line to change.
        UsageError: `plan_or_mesh` is none of these.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> check_before_sharding(model, [model["wte"], model["lm_head"]])
        Traceback (most recent call last):
        bowline.errors.TieError: lm_head.weight <- wte.weight: its ends are in two groups, expected one (help: for \
group in bowline.shard_groups(model): fully_shard(group, mesh=mesh))
    """
    expect_module(model)
    known = slots(model)
    found = find_ties(model)
    ties = tuple({tie.target: tie for tie in (*declared_ties(model), *found.ties, *found.aliases)}.values())
    faults = [*_not_tied(model, ties), *_plan_faults(model, ties, known, plan_or_mesh)]
    if optimizer is not None:
        faults += _too_early(known, optimizer)
    description = [(str(tie), *_description(known.get(tie.source))) for tie in ties]
    faults += _from_all_processes(faults, description)
    if faults:
        told = list(dict.fromkeys(faults))
        helps = list(dict.fromkeys(way_out for _, way_out in told))
        raise TieError("; ".join(seen for seen, _ in told), help="; ".join(helps))


def _not_tied(model: nn.Module, ties: Sequence[Tie]) -> Iterator[Fault]:
    for check in check_ties(model, ties).broken:
        yield f"{check}".replace("\n  ", "; "), "bowline.tie_weights(model), before it is sharded"


def _plan_faults(model: nn.Module, ties: Sequence[Tie], known: Mapping[str, Slot], plan: Any) -> Iterator[Fault]:
    if plan is None:
        return
    if hasattr(plan, "mesh_dim_names") and hasattr(plan, "shape"):
        yield from _too_few_rows(ties, known, max(plan.shape))
    elif hasattr(plan, "fsdp_size"):
        yield from _by_transformers(ties, known, plan)
    elif isinstance(plan, Mapping):
        yield from _plan_of_names(model, ties, plan)
    elif isinstance(plan, Iterable) and not isinstance(plan, str):
        yield from _groups(ties, known, model, list(plan))
    else:
        raise UsageError(
            f"plan_or_mesh is a {type(plan).__name__}, expected a DeviceMesh, the groups for fully_shard, a plan by "
            "names, or a DistributedConfig",
            argument="plan_or_mesh",
        )


def _too_few_rows(ties: Sequence[Tie], known: Mapping[str, Slot], processes: int) -> Iterator[Fault]:
    for name in {tie.source for tie in ties if tie.source in known}:
        rows = known[name].tensor.shape[0] if known[name].tensor.ndim else 1
        if known[name].tensor.ndim == 2 and rows < processes:
            yield (
                f"{name}: has {rows} rows for {processes} processes, expected one at least for each",
                "take a smaller mesh, or bowline.resize_vocab(model, size)",
            )


def _by_transformers(ties: Sequence[Tie], known: Mapping[str, Slot], config: Any) -> Iterator[Fault]:
    processes = config.fsdp_size or 1
    for tie in ties:
        held = known.get(tie.source)
        if held is None or processes < 2 or held.tensor.ndim != 2 or held.tensor.shape[0] % processes == 0:
            continue
        yield (
            f"{tie}: DistributedConfig(fsdp_size={processes}) ties the ends again after they are sharded, and "
            f"{held.tensor.shape[0]} rows do not divide by {processes}, so the head would use rows of the first step",
            f"load without distributed_config, then: {BY_GROUPS}",
        )
    stages = getattr(config, "pp_size", None) or 1
    for tie in ties if stages > 1 else ():
        yield (
            f"{tie}: DistributedConfig(pp_size={stages}) gives the last stage a copy of the matrix, which training "
            "makes another one, since nothing sums the copies' gradients",
            f'after loading, on every process: bowline.PipelineTie(model, "{tie.source}", mesh)',
        )


def _groups(ties: Sequence[Tie], known: Mapping[str, Slot], model: nn.Module, given: Sequence[Any]) -> Iterator[Fault]:
    """Faults of a list of calls of `fully_shard`: a place belongs to the first call that covers it, as in torch."""
    group_of: dict[nn.Module, int] = {}
    inside = set(model.modules())
    for at, group in enumerate(given):
        modules = list(group) if isinstance(group, (list, tuple)) else [group]
        for module in modules:
            if not isinstance(module, nn.Module) or module not in inside:
                kind = type(module).__name__
                yield f"group {at} has a {kind} that is not in the model, expected its modules", BY_GROUPS
                continue
            for part in module.modules():
                group_of.setdefault(part, at)
    for tie in ties:
        ends = [known[name] for name in (tie.target, tie.source) if name in known]
        groups = {group_of.get(end.module, len(given)) for end in ends}
        if len(groups) > 1:
            yield f"{tie}: its ends are in two groups, expected one", BY_GROUPS


def _plan_of_names(model: nn.Module, ties: Sequence[Tie], plan: Mapping[Any, Any]) -> Iterator[Fault]:
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = "plan = bowline.tensor_parallel_plan(model)"
    for pattern in plan:
        if not any(_matches(name, str(pattern)) for name in modules):
            yield f"plan[{pattern!r}]: {type(model).__name__} has no such module", whole
    for tie in ties:
        axes = []
        for name in (tie.target, tie.source):
            path = name.rpartition(".")[0]
            style = next((style for pattern, style in plan.items() if _matches(path, str(pattern))), None)
            axes.append(_axis(style, modules.get(path)))
        if axes[0] == axes[1]:
            continue
        seen = [
            f"shards {name} by {axis}" if axis else f"leaves {name} whole"
            for name, axis in zip((tie.target, tie.source), axes, strict=True)
        ]
        yield f"{tie}: the plan {seen[0]} and {seen[1]}, expected the same for both", whole


def _matches(name: str, pattern: str) -> bool:
    """Whether the name of a module fits a plan's pattern, in which each `*` stands for one part, as in torch."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


def _axis(style: Any, module: nn.Module | None) -> str | None:
    """The axis of the weight along which a style shards, or `None` if it leaves the weight whole."""
    name = style if isinstance(style, str) else type(style).__name__
    kind = "col" if "col" in name.lower() else "row" if "row" in name.lower() else None
    if kind is None or style is None:
        return None
    is_table = isinstance(module, nn.Embedding)
    return BY_ROWS if (kind == "row") is is_table else BY_COLUMNS


def _too_early(known: Mapping[str, Slot], optimizer: Optimizer) -> Iterator[Fault]:
    optimizer_groups.expect_groups(optimizer)
    live = {id(end.tensor): end for end in known.values()}
    held = [parameter for _, parameter in optimizer_groups.held(optimizer)]
    whole = [live[id(parameter)] for parameter in held if id(parameter) in live and not is_dtensor(parameter)]
    lost = sum(id(parameter) not in live for parameter in held)
    line = "build the optimizer after fully_shard or parallelize_module: optimizer = AdamW(model.parameters())"
    if whole:
        yield (
            f"the optimizer holds {whole[0].name} and {len(whole) - 1} other parameters that sharding replaces, so its "
            "steps would have no effect",
            line,
        )
    if lost:
        yield f"the optimizer holds {lost} parameters that the model does not have", line


def _description(held: Slot | None) -> tuple[Any, ...]:
    return () if held is None else (tuple(held.tensor.shape), str(held.tensor.dtype))


def _from_all_processes(faults: Sequence[Fault], description: Sequence[Any]) -> list[Fault]:
    """The faults of other processes, and the first difference between their ties. Every process has to call this."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (list(faults), list(description)))
    found: list[Fault] = []
    for process, (theirs, _) in enumerate(everyone):
        found += [(f"process {process}: {seen}", line) for seen, line in theirs if (seen, line) not in faults]
    for (first, (_, one)), (second, (_, other)) in pairwise(enumerate(everyone)):
        if one != other:
            found.append(
                (
                    f"processes {first} and {second} disagree about their ties: {_told(one)} and {_told(other)}",
                    "load the same config and checkpoint on every process",
                )
            )
            break
    return found


def _told(description: Sequence[Any]) -> str:
    return ", ".join(" ".join(map(str, one)) for one in description) or "none"
