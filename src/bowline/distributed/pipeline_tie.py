"""Keeps the copies of a tied matrix on several pipeline stages one matrix: values, gradients, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bowline.distributed.gradient_norm import clip_by_norm, gradient_norm
from bowline.errors import TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.guards.replicas import checksum
from bowline.nn.ties.optimizer_groups import expect_groups
from bowline.nn.tree.sharding import local_part, placed_alike, placement_of
from bowline.nn.tree.slots import slots
from bowline.nn.tree.storages import overlapping
from bowline.nn.tree.unique_parameters import unique_parameters

__all__ = ["PipelineTie"]

MARK = "_bowline_summed_at"
"""The attribute of a summed gradient that holds its version: it lives as long as the gradient, and keeps no memory."""
RELOAD = "load the same config and checkpoint on every stage; shard all copies alike"
FRESH, SUMMED, CHANGED = "fresh", "summed", "changed"


class PipelineTie:
    """Keeps the copies of one tied matrix equal that stand on several stages of a pipeline.

    The first stage has the input embedding and the last one the head, each with a parameter of its own. Every rank of
    the pipeline makes a `PipelineTie`, with the same line, once its stages are built and sharded: this compares the
    copies and broadcasts the source's values. A step is then

        schedule.step(...)
        tie.reduce_gradients()
        tie.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    All copies get the sum of their gradients, so equal optimizers keep them equal to the bit. The optimizers' settings
    for the matrix have to be the same on all stages. Each step needs new gradients, as after `zero_grad()`, and not
    ones that were zeroed in place.

    Args:
        module: this rank's stage, or its stages as a list: modules, or `PipelineStage`s. `None` if it has none.
        name: the name of the copy in its stage (`"lm_head.weight"`), or all names under which stages have copies. The
            rank's copies are those of the names that its stages have. A rank with none takes part only in making the
            tie and in `clip_grad_norm_`. Two copies on one rank are summed there, and may be one `Parameter` if they
            are in one stage.
        group: the ranks of the pipeline: a `ProcessGroup`, or a mesh's dimension, `mesh["pp"]`. With data or tensor
            parallelism each coordinate has a group of its own, and ties its own parts of the matrix.
        source: the rank, counted within the group, whose copy has the values; of two copies there, the one named first.

    Parameters are looked up by name whenever they are needed, because sharding and loading replace them. Every rank
    calls every method equally often; on a rank without a copy, all but `clip_grad_norm_` do nothing. Errors of making
    the tie, of `broadcast` and of `check` are raised on all ranks that the call compares, so that none waits.

    Raises:
        TieError: on every rank of the group: no or two sources, a name that no stage has, or copies whose shapes,
            dtypes, local parts or `requires_grad` differ.
        UsageError: `group` is no process group of this rank.

    Example:
        One rank that has both ends, as in a V schedule; of two or more ranks, each has the same line.

        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> stages = [nn.ModuleDict({"wte": nn.Embedding(9, 4)}), nn.ModuleDict({"head": nn.Linear(4, 9, bias=False)})]
        >>> tie = PipelineTie(stages, ["wte.weight", "head.weight"], distributed.group.WORLD)
        >>> torch.equal(stages[0]["wte"].weight, stages[1]["head"].weight)
        True
        >>> distributed.destroy_process_group()
    """

    def __init__(self, module: Any, name: str | Sequence[str], group: Any, *, source: int = 0) -> None:
        self.group = _process_group(group)
        ranks = distributed.get_process_group_ranks(self.group)
        rank = distributed.get_rank()
        fault = ""
        try:
            names, self._modules = _names(name), _modules(module)
            self._copies = _found(self._modules, names)
            self._sharded = any(is_dtensor(copy.weight) for copy in self._copies)
            description = _descriptions(rank, self._copies)
        except (TieError, UsageError) as error:
            names, self._copies, description, fault = (), (), [], str(error)
        near = {} if fault else _nearest(self._modules, set(names) - set(self.names))
        everyone = _gathered(self.group, _Report(rank, names, source, description, fault, near))
        _expect_one_source(everyone, ranks)
        self.source = source
        self._source_rank: int = ranks[source]
        found = [copy for report in everyone for copy in report.copies]
        _expect_alike(found, self._source_rank)
        self._frozen = not found[0].trainable
        self.ranks: tuple[int, ...] = tuple(rank for rank in ranks if any(copy.rank == rank for copy in found))
        self._holders = self._group_of_holders(ranks)
        self.broadcast()

    def _group_of_holders(self, ranks: Sequence[int]) -> distributed.ProcessGroup | None:
        """The group of the ranks with copies; `None` on the others, and where one rank has all."""
        if not self._copies or len(self.ranks) == 1:
            return None
        if len(self.ranks) == len(ranks):
            return self.group
        backend = distributed.get_backend_config(self.group)
        made = distributed.new_group(list(self.ranks), backend=backend, use_local_synchronization=True)
        assert isinstance(made, distributed.ProcessGroup)
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """The names of this rank's copies, the source first; empty on a rank that has none."""
        return tuple(copy.name for copy in self._copies)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy the source's values to all copies: after every load, and after a change of `requires_grad`.

        Raises:
            TieError: on every rank with a copy: copies no longer agree in shape, dtype or placement, or one is lost.
        """
        if not self._copies:
            return
        found = self._compared()
        self._frozen = not found[0].trainable
        weights = self._weights()
        first, *rest = (local_part(weight.detach()) for weight in weights)
        if self._holders is not None and first.numel():
            values = first.contiguous()
            distributed.broadcast(values, src=self._source_rank, group=self._holders)
            if values is not first:
                first.copy_(values)
        for other in rest:
            other.copy_(first)

    def check(self) -> None:
        """Compare the copies' bits now, by a checksum of each; of sharded copies, this coordinate's parts.

        Raises:
            TieError: on every rank with a copy: which copies, on which ranks, differ from the source.
        """
        if not self._copies:
            return
        found = self._compared(with_checksums=True)
        source = next(copy for copy in found if copy.rank == self._source_rank)
        apart = [copy for copy in found if copy.checksum != source.checksum]
        if apart:
            raise TieError(
                f"{_listed(apart)} {'differs' if len(apart) == 1 else 'differ'} from the source, {source}",
                help="tie.broadcast() on every rank copies the source; reduce_gradients belongs before every step, "
                "and the optimizers' settings have to agree",
            )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients, once a step: after the schedule's, before clipping.

        A copy without a gradient counts as zero, and has one afterwards. A gradient that is placed otherwise than its
        weight is redistributed first.

        Raises:
            TieError: the gradients were summed already in this step, so a second sum would count them twice.
        """
        weights = self._weights()
        state = self._state(weights)
        if state != FRESH:
            raise TieError(
                f"{self.names[0]}: its gradient was summed already"
                + (", and changed afterwards" if state == CHANGED else "")
                + ", expected a new one in each step",
                help="call reduce_gradients once, after the last backward of a step and after unscaling, and then "
                "optimizer.zero_grad(set_to_none=True) before the next",
            )
        self._sum(weights)

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor | nn.Module,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        others: Sequence[PipelineTie] = (),
    ) -> torch.Tensor:
        """Clip by the norm of all stages' gradients, in which the tied matrix counts once, and return that norm.

        Every rank of the pipeline calls it, with the parameters of its stages. It sums the gradients of the tie first
        if that has not been done. Parameters that are listed twice, or are DTensors, are counted right. `others` are
        further ties of the same pipeline, in the same order on every rank.

        Raises:
            TieError: the summed gradients have been changed since.
        """
        ties = (self, *others)
        for tie in ties:
            tie._sum_if_fresh()
        given = [parameter for parameter in unique_parameters(parameters) if parameter.grad is not None]
        again = {id(weight) for tie in ties for weight in tie._counted_elsewhere()}
        counted = [parameter for parameter in given if id(parameter) not in again]
        norm = gradient_norm(counted, norm_type, group=self.group, device=self._device(counted))
        clip_by_norm(given, max_norm, norm)
        for tie in ties:
            for weight in tie._weights():
                _mark(weight)
        return norm

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Have each `optimizer.step()` sum the gradients first, unless that was done; the handle's `remove()` ends it.

        The optimizers of all ranks with copies have to step equally often.

        Raises:
            TieError: at a step: the summed gradients have been changed since, as by torch's own `clip_grad_norm_`.
            UsageError: at a step: it has a closure, which computes the gradients too late.
        """
        expect_groups(optimizer)
        inner: Any = optimizer
        while isinstance(getattr(inner, "optimizer", None), Optimizer):  # accelerate's and Lightning's run no hooks
            inner = inner.optimizer

        def before_step(stepped: Optimizer, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if any(each is not None and each is not stepped for each in (*inputs, named.get("closure"))):
                raise UsageError(
                    "closure: computes gradients inside the step, expected a step without one", argument="closure"
                )
            self._sum_if_fresh()

        handle: RemovableHandle = inner.register_step_pre_hook(before_step)
        return handle

    def _weights(self) -> list[nn.Parameter]:
        """This rank's copies as they are now, each parameter once, the source first."""
        weights = list({id(weight): weight for weight in (copy.weight for copy in self._copies)}.values())
        sharded = any(is_dtensor(weight) for weight in weights)
        if self._sharded and not sharded:
            raise TieError(
                f"{self.names[0]}: is gathered now and was sharded before, so its values and gradients are not those "
                "of the optimizer's parameter",
                help="call stage.reshard() after a forward pass without a backward pass",
            )
        self._sharded = sharded
        return weights

    def _state(self, weights: Sequence[nn.Parameter]) -> str:
        marks = [
            (getattr(weight.grad, MARK, None), _version(weight.grad)) for weight in weights if weight.grad is not None
        ]
        if all(mark is None for mark, _ in marks):
            return FRESH
        return SUMMED if len(marks) == len(weights) and all(mark == now for mark, now in marks) else CHANGED

    @torch.no_grad()
    def _sum_if_fresh(self) -> None:
        weights = self._weights()
        state = self._state(weights)
        if state == CHANGED:
            raise TieError(
                f"{self.names[0]}: its gradient was changed after it was summed, expected a new one or the sum",
                help="clip by tie.clip_grad_norm_, unscale before reduce_gradients, and call "
                "optimizer.zero_grad(set_to_none=True) after each step",
            )
        if state == FRESH:
            self._sum(weights)

    def _sum(self, weights: Sequence[nn.Parameter]) -> None:
        for weight in weights:
            if weight.requires_grad is self._frozen:
                now, before = ("frozen", "trained") if self._frozen is False else ("trained", "frozen")
                raise TieError(
                    f"{self.names[0]}: is {now} and was {before} when the copies were compared",
                    help="freeze or unfreeze all copies, then call broadcast() on every rank",
                )
        if self._frozen or not weights:
            return
        for weight in weights:
            _place_gradient(weight)
        first, *rest = (_local_gradient(weight) for weight in weights)
        for other in rest:
            first += other
        if self._holders is not None and first.numel():
            total = first.contiguous()
            distributed.all_reduce(total, group=self._holders)
            if total is not first:
                first.copy_(total)
        for other in rest:
            other.copy_(first)
        for weight in weights:
            _mark(weight)

    def _counted_elsewhere(self) -> list[nn.Parameter]:
        """This rank's copies, without the one that the norm counts."""
        weights = self._weights()
        return weights[1:] if distributed.get_rank() == self._source_rank else weights

    @torch.no_grad()
    def _device(self, parameters: Sequence[torch.Tensor]) -> torch.device:
        """The device on which this rank communicates, whether or not its stage has gradients."""
        for tensor in (*parameters, *(each for module in self._modules for each in module.parameters())):
            return tensor.device
        usual = torch.accelerator.current_accelerator()
        return torch.device("cpu") if usual is None or distributed.get_backend(self.group) == "gloo" else usual

    def _compared(self, *, with_checksums: bool = False) -> list[_Description]:
        """All ranks' copies as they are now, which agree; a fault of one rank is raised on all that have copies."""
        rank, own, fault = distributed.get_rank(), list[_Description](), ""
        try:
            self._weights()
            own = _descriptions(rank, self._copies, with_checksums=with_checksums)
        except TieError as error:
            fault = str(error)
        everyone = [(rank, own, fault)] if self._holders is None else _gathered(self._holders, (rank, own, fault))
        for each, _, seen in everyone:
            if seen:
                raise TieError(f"rank {each}: {seen}")
        found = [copy for _, copies, _ in everyone for copy in copies]
        _expect_alike(found, self._source_rank)
        return found


# --- what a rank has --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copy:
    """The place of a copy: `module.name`, where the parameter is looked up whenever it is needed."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> nn.Parameter:
        try:
            return self.module.get_parameter(self.name)
        except AttributeError:
            raise TieError(
                f"{self.name}: holds no parameter now, expected the copy that was there",
                help="the stage was changed: put the parameter back, or make a new PipelineTie on every rank",
            ) from None


@dataclass(frozen=True, slots=True)
class _Description:
    """A copy in words and numbers, for the other ranks."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    part: tuple[tuple[int, ...], tuple[int, ...]]
    """The local shape, and the place of its first element in the whole matrix."""
    placement: str
    trainable: bool
    checksum: int

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"

    @property
    def seen(self) -> str:
        """The properties that all copies must share, in words."""
        frozen = "" if self.trainable else ", frozen"
        local, start = self.part
        part = "" if local == self.shape else f", of which {local} from {start}"
        return f"{self.shape} {self.dtype}{part} ({self.placement}){frozen}"

    @property
    def agreed(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.part, self.trainable


@dataclass(frozen=True, slots=True)
class _Report:
    """The message of one rank to the others while the tie is made: its copies, or its fault."""

    rank: int
    names: tuple[str, ...]
    source: int
    copies: list[_Description]
    fault: str
    near: dict[str, list[str]]


def _process_group(group: Any) -> distributed.ProcessGroup:
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise UsageError(
                f"group is a mesh of {group.ndim} dimensions, expected the pipeline's alone",
                help='pass mesh["pp"]',
                argument="group",
            )
        group = group.get_group()
    if not isinstance(group, distributed.ProcessGroup) or distributed.get_rank(group) < 0:
        raise UsageError(
            f"group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup that this rank is in",
            help="torch.distributed.group.WORLD is all processes; a DeviceMesh gives its own by get_group()",
            argument="group",
        )
    return group


def _names(name: Any) -> tuple[str, ...]:
    names = (name,) if isinstance(name, str) else tuple(name)
    if not names or not all(isinstance(each, str) and each for each in names):
        raise UsageError(f"name={name!r}: expected a parameter's name, or several", argument="name")
    return tuple(dict.fromkeys(names))


def _modules(module: Any) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    if isinstance(module, (list, tuple)):
        return tuple(each for some in module for each in _modules(some))
    held = getattr(module, "submod", module)  # a PipelineStage's
    if isinstance(held, nn.parallel.DistributedDataParallel):
        held = held.module
    if not isinstance(held, nn.Module):
        raise UsageError(
            f"module is a {type(module).__name__}, expected this rank's stage or stages, or None", argument="module"
        )
    return (held,)


def _found(modules: Sequence[nn.Module], names: Sequence[str]) -> tuple[_Copy, ...]:
    """The copies in a rank's stages, in the order of the names."""
    found = []
    for name in names:
        for module in modules:
            try:
                module.get_parameter(name)
            except AttributeError:
                continue
            found.append(_Copy(module, name))
    distinct: dict[int, _Copy] = {}
    for copy in found:
        first = distinct.setdefault(id(copy.weight), copy)
        if first.module is not copy.module:
            raise TieError(
                f"{first.name} and {copy.name} are one parameter in two stages of this rank, whose gradient a schedule "
                "with scale_grads=True divides by the number of microbatches once for each stage",
                help="give each stage a parameter of its own; or, with scale_grads=False, pass "
                "torch.nn.ModuleList(modules) as one module",
            )
    for one, other in overlapping([(copy.name, copy.weight) for copy in distinct.values()]):
        raise TieError(
            f"{one} and {other} are two parameters on the same memory, which an optimizer would step twice",
            help="give each a copy of its own, or assign one to the other within a stage",
        )
    return tuple(found)


def _nearest(modules: Sequence[nn.Module], names: Iterable[str]) -> dict[str, list[str]]:
    """For each name that this rank does not have, the most alike of those that it has."""
    missing = sorted(names)
    known = sorted({known for module in modules for known in slots(module)}) if missing else []
    return {name: get_close_matches(name, known, n=1, cutoff=0.5) for name in missing}


def _descriptions(rank: int, copies: Sequence[_Copy], *, with_checksums: bool = False) -> list[_Description]:
    return [
        _Description(
            rank=rank,
            name=copy.name,
            shape=tuple(weight.shape),
            dtype=str(weight.dtype).removeprefix("torch."),
            part=_part(weight),
            placement=placement_of(weight),
            trainable=weight.requires_grad,
            checksum=int(checksum(local_part(weight))) if with_checksums else 0,
        )
        for copy, weight in ((copy, copy.weight) for copy in copies)
    ]


def _part(weight: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not is_dtensor(weight):
        return tuple(weight.shape), (0,) * weight.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return tuple(local), tuple(start)


def _gathered(group: distributed.ProcessGroup, own: Any) -> list[Any]:
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, own, group=group)
    return everyone


# --- what ranks compare, each with the same outcome -------------------------------------------------------------------


def _expect_one_source(everyone: Sequence[_Report], ranks: Sequence[int]) -> None:
    """Raise on every rank what one of them found, or where they disagree about the source and the names."""
    for report in everyone:
        if report.fault:
            raise TieError(f"rank {report.rank}: {report.fault}")
    sources = {report.source: report.rank for report in everyone}
    if len(sources) > 1:
        seen = " and ".join(f"rank {rank} has source={source}" for source, rank in sorted(sources.items())[:2])
        raise TieError(f"{seen}: expected one", help="give the same source on every rank")
    source = everyone[0].source
    if not isinstance(source, int) or not 0 <= source < len(ranks):
        raise TieError(f"source={source!r}: expected a rank within the group, 0 to {len(ranks) - 1}")
    found = [copy for report in everyone for copy in report.copies]
    known = {copy.name for copy in found}
    for name in dict.fromkeys(name for report in everyone for name in report.names):
        if name not in known:
            near = dict.fromkeys(close for report in everyone for close in report.near.get(name, []))
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise TieError(f"{name}: no stage has such a parameter{hint}", help="use the names in the stage's module")
    if not any(copy.rank == ranks[source] for copy in found):
        raise TieError(
            f"source={source} is rank {ranks[source]}, whose stages have no copy; the copies are {_listed(found)}",
            help="source= the rank, counted within the group, whose copy has the values",
        )
    if len(found) == 1:
        raise TieError(
            f"{found[0]} is the only copy, so there is nothing to keep equal", help="name the copies of all stages"
        )


def _expect_alike(found: Sequence[_Description], source_rank: int) -> None:
    """Raise a `TieError` if a copy does not agree with the source's."""
    source = next(copy for copy in found if copy.rank == source_rank)
    unlike = [copy for copy in found if copy.agreed != source.agreed]
    if unlike:
        seen = "; ".join(f"{copy} is {copy.seen}" for copy in unlike)
        raise TieError(f"{seen}; expected as the source, {source}: {source.seen}", help=RELOAD)


def _listed(copies: Sequence[_Description]) -> str:
    return ", ".join(map(str, copies)) or "none"


# --- gradients --------------------------------------------------------------------------------------------------------


def _place_gradient(weight: Any) -> None:
    """Give a weight a gradient that is placed as the weight is: zeros if it has none."""
    grad = weight.grad
    if grad is None:
        weight.grad = torch.zeros_like(weight, dtype=getattr(weight, "grad_dtype", None), requires_grad=False)
    elif grad.layout is not torch.strided:
        weight.grad = grad.to_dense()
    elif is_dtensor(grad) and not placed_alike(grad, weight):
        weight.grad = grad.redistribute(weight.device_mesh, weight.placements)


def _local_gradient(weight: nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None
    return local_part(weight.grad)


def _mark(weight: nn.Parameter) -> None:
    if weight.grad is not None:
        setattr(weight.grad, MARK, _version(weight.grad))


def _version(grad: torch.Tensor) -> tuple[int, int]:
    """Changes with each accumulation in place, which torch counts in a DTensor and not in its local part."""
    return grad._version, local_part(grad)._version
