"""Checks that a copy of a tied model, such as an inference engine's, has the matrix at both ends of each tie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from bowline.errors import BowlineError, TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.ties.copied_ends import Copy, copied_ends
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.ends import holds
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tensor_comparison import difference, is_plain
from bowline.nn.tree.sharding import meshes_of, whole_tensor
from bowline.nn.tree.slots import Slot, expect_module
from bowline.nn.tree.storages import extent
from bowline.nn.tree.table_slots import tie_ends
from bowline.tie import Tie

__all__ = ["SyncedEnd", "WeightSync", "check_weight_sync"]

Found = dict[str, tuple[str, torch.Tensor]]
Fault = tuple[str, str]
"""What was seen and expected, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedEnd:
    """One end of a tie in the copy, which has the model's matrix.

    `name` is the model's and `copy_name` the copy's, or `None` for an end that a copy with `tied=True` lacks. `rows`
    were equal in `dtype`; the `padding` rows after them were not compared. `same_as` is the other end that is the same
    tensor in the copy.
    """

    name: str
    copy_name: str | None
    rows: int = 0
    padding: int = 0
    dtype: torch.dtype | None = None
    same_as: str | None = None

    def __str__(self) -> str:
        if self.copy_name is None:
            return f"{self.name}: not in the copy, which ties it itself"
        called = f" (in the copy {self.copy_name})" if self.copy_name != self.name else ""
        same = f", the same tensor as {self.same_as}" if self.same_as else ""
        padding = f", {self.padding} padding rows not compared" if self.padding else ""
        return f"{self.name}{called}: {self.rows} rows equal as {self.dtype}{same}{padding}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """A copy that has the model's matrix at both ends of each tie. `ends` is empty on a process without a copy."""

    ties: tuple[Tie, ...]
    ends: tuple[SyncedEnd, ...]

    def __str__(self) -> str:
        if not self.ties:
            return "no ties"
        return "\n".join(map(str, self.ends)) or "no copy on this process"


@torch.no_grad()
def check_weight_sync(model: nn.Module, copy: Copy | None, *, tied: bool = False) -> WeightSync:
    """Compares both ends of each tie in a copy with the model's one matrix, after its weights were sent there.

    The trainer of a tied model sends one matrix. A copy whose head is another parameter needs it twice: if it gets the
    embedding alone, it samples with an old head, silently.

    Each value has to be equal after a cast to the copy's dtype. The copy may have more rows at the end, as vLLM pads
    its vocabulary; those are not compared, and the report counts them. Every end has to be in the copy, under its own
    name or one with other leading parts, such as a wrapper's. A copy that computes both ends from one tensor may lack
    the others, but a state dict cannot show that: `tied=True` says so.

    A model that is sharded (DTensors) is gathered one matrix at a time. Every process of its mesh has to call this, and
    gets the same verdict; `copy` is `None` on processes without one.

    Args:
        model: the trainer's model, whose ties are those that it declares (`declared_ties`) and has (`find_ties`).
        copy: a module, a state dict, or pairs `(name, tensor)`. None of its tensors is changed.
        tied: whether the copy makes the tie itself, so that one of the ends is enough.

    Raises:
        TieError: an end of the copy is stale, missing, or of another shape; or the model's own tie does not hold.
        UsageError: `copy` is not a copy, or no process has one.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(check_weight_sync(model, {"wte.weight": model["wte"].weight}, tied=True))
        wte.weight: 9 rows equal as torch.float32
        lm_head.weight: not in the copy, which ties it itself
    """
    expect_module(model)
    known = tie_ends(model)
    meshes = meshes_of(slot.tensor for slot in known.values())
    error: BowlineError | None = None
    ties: tuple[Tie, ...] = ()
    found: Found = {}
    try:
        ties = _ties(model, known)
        names = dict.fromkeys(name for tie in ties for name in (tie.source, tie.target))
        if copy is not None:
            found = copied_ends(copy, {name: known[name] for name in names})
            _expect_ends(ties, found, tied)
    except BowlineError as raised:
        error = raised
    _raise_everywhere(meshes, error, has_copy=copy is not None)
    ends: list[SyncedEnd] = []
    faults: list[Fault] = []
    for source in dict.fromkeys(tie.source for tie in ties):
        whole = whole_tensor(known[source].tensor.detach())
        group = (source, *(tie.target for tie in ties if tie.source == source))
        compared = [_compared(name, group, whole, found) for name in group] if copy is not None else []
        ends += [each for each in compared if isinstance(each, SyncedEnd)]
        wrong = [each for each in compared if not isinstance(each, SyncedEnd)]
        faults += [(seen, way_out or _help(group, wrong, found)) for seen, way_out in wrong]
    _raise_everywhere(meshes, _as_error(faults), has_copy=copy is not None)
    return WeightSync(ties=ties, ends=tuple(ends))


def _ties(model: nn.Module, known: Mapping[str, Slot]) -> tuple[Tie, ...]:
    """The model's ties, all of which hold."""
    ties = tuple({tie.target: tie for tie in (*declared_ties(model, known=known), *find_ties(model).ties)}.values())
    broken = [tie for tie in ties if not holds(tie, known)]
    if broken:
        raise TieError(
            f"{', '.join(map(str, broken))}: does not hold in the model, expected one parameter",
            help="bowline.check_ties(model) says why; bowline.tie_weights(model) makes the tie",
        )
    for source in {tie.source for tie in ties}:
        kind = _unfit(known[source].tensor)
        if kind:
            raise TieError(f"{source}: is {kind} in the model, expected a float matrix", help="pass the float model")
    return ties


def _expect_ends(ties: Sequence[Tie], found: Found, tied: bool) -> None:
    faults: list[Fault] = []
    for source in dict.fromkeys(tie.source for tie in ties):
        group = (source, *(tie.target for tie in ties if tie.source == source))
        absent = [name for name in group if name not in found]
        if len(absent) == len(group):
            faults.append(
                (f"the copy has neither of {', '.join(group)}, expected each of them", f'send "{source}" to the copy')
            )
        elif absent and not tied:
            faults.append(
                (
                    f"the copy has no {', '.join(absent)}, expected the matrix of {source} there too",
                    "send the matrix under each name; or, if the copy makes the tie itself, pass tied=True",
                )
            )
    error = _as_error(faults)
    if error is not None:
        raise error


def _compared(name: str, group: Sequence[str], whole: torch.Tensor, found: Found) -> SyncedEnd | tuple[str, str]:
    """The end as the report has it; or the fault, with a way out if it is not a stale end's."""
    if name not in found:
        return SyncedEnd(name=name, copy_name=None)
    copy_name, held = found[name]
    held = whole_tensor(held.detach())
    shown = f"{copy_name} of the copy"
    kind = _unfit(held)
    if kind:
        return f"{shown} is {kind}, expected a float matrix", "check the copy before it is quantised or moved"
    padding = len(held) - len(whole) if held.ndim and whole.ndim else 0
    if held.shape[1:] != whole.shape[1:] or held.ndim != whole.ndim or padding < 0:
        return (
            f"{shown} is {tuple(held.shape)}, expected {tuple(whole.shape)}, or more rows",
            "resize the copy's vocabulary as the model's; gather a copy whose rows are split over processes",
        )
    values = held[: len(whole)] if whole.ndim else held
    apart = difference(whole.to(device=held.device, dtype=held.dtype), values)
    if apart.rows:
        return (
            f"{shown} is stale: {apart.rows} of {apart.of} rows ({apart.rows / apart.of:.0%}) differ from the model's "
            f"{group[0]}, by at most {apart.largest:.3g}",
            "",
        )
    earlier = [other for other in group[: group.index(name)] if other in found]
    same = next((other for other in earlier if _one_tensor(found[other][1], found[name][1])), None)
    return SyncedEnd(name=name, copy_name=copy_name, rows=apart.of, padding=padding, dtype=held.dtype, same_as=same)


def _unfit(tensor: torch.Tensor) -> str:
    """In words, why the values of a tensor cannot be compared; nothing if they can."""
    if tensor.is_meta:
        return "on meta"
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return f"{tensor.dtype}"
    plain = is_plain(tensor.data) or is_dtensor(tensor)
    return "" if plain else f"a {type(tensor).__name__}"


def _one_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    place = extent(one.data)
    return one is other or (place is not None and place == extent(other.data))


def _help(group: Sequence[str], wrong: Sequence[object], found: Found) -> str:
    if len(wrong) == sum(name in found for name in group):
        return "send the weights again, after the optimizer's last step"
    names = " and ".join(f'"{found[name][0] if name in found else name}"' for name in group)
    return f"send the matrix under each name, {names}; or call the copy's tie_weights() after it has loaded"


def _as_error(faults: Sequence[Fault]) -> TieError | None:
    if not faults:
        return None
    return TieError(
        "; ".join(seen for seen, _ in faults), help="; ".join(dict.fromkeys(way_out for _, way_out in faults))
    )


def _raise_everywhere(meshes: Sequence[Any], error: BowlineError | None, *, has_copy: bool) -> None:
    """Raises this process's error, or those of the other processes of the meshes, which all have to call this."""
    everyone: dict[int, tuple[str, str, bool]] = {
        _rank(): (error.message if error else "", error.help or "" if error else "", has_copy)
    }
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            theirs: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(theirs, everyone, group=group)
            for each in theirs:
                everyone |= each
    if error is not None:
        raise error
    if not any(copies for *_, copies in everyone.values()):
        raise UsageError(
            "copy is None" + (" on every process" if meshes else "") + ", expected a module or named tensors",
            argument="copy",
        )
    faults = [(f"process {rank}: {seen}", way_out) for rank, (seen, way_out, _) in everyone.items() if seen]
    elsewhere = _as_error(faults)
    if elsewhere is not None:
        raise elsewhere


def _rank() -> int:
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0
