"""Finds what a model shares now: one parameter under two names (a tie), or only memory (an alias)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.storages import knots, overlapping
from bowline.nn.tree.table_slots import TableSlot, is_lookup, tie_ends
from bowline.tie import Tie

__all__ = ["FoundTies", "find_ties", "shared_ties"]


@dataclass(frozen=True, slots=True)
class FoundTies:
    """`ties` hold one `Parameter`; `aliases` are two `Parameter`s on one memory, views included. Iterates over `ties`.

    An alias trains and saves like a tie only until something touches it: an optimizer keeps two states, `.to` and
    sharding make two tensors of it. `tie_weights` turns it into a tie.
    """

    ties: tuple[Tie, ...]
    aliases: tuple[Tie, ...]

    def __iter__(self) -> Iterator[Tie]:
        return iter(self.ties)

    def __len__(self) -> int:
        return len(self.ties)

    def __contains__(self, tie: object) -> bool:
        return tie in self.ties

    def __str__(self) -> str:
        lines = [f"{tie} SHARED" for tie in self.ties] + [f"{tie} ALIAS" for tie in self.aliases]
        return "\n".join(lines) or "nothing is shared"


def find_ties(model: nn.Module) -> FoundTies:
    """Every pair of names in `model` that is one `Parameter`, and every pair of `Parameter`s that share memory.

    The source of a tie is the name that a declaration names as one, else an embedding's, else the first one
    registered. Parameters only: modules share buffers by right. The ends of a table that `quantize_tied` made are tied
    too, by the names of the parameters that they had.

    Example:
        >>> class Tiny(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.lm_head = nn.Linear(4, 9, bias=False)
        ...         self.wte = nn.Embedding(9, 4)
        ...         self.lm_head.weight = self.wte.weight
        >>> print(find_ties(Tiny()))
        lm_head.weight <- wte.weight SHARED
    """
    known = tie_ends(model)
    rank = _ranking(model, known)
    sources = [min(group, key=rank) for group in _holders(known)]
    aliases = []
    for knot in knots(overlapping([(at, source.tensor) for at, source in enumerate(sources)])):
        first, *others = sorted((sources[at] for at in knot), key=rank)
        aliases += [Tie(other.name, first.name) for other in others]
    return FoundTies(shared_ties(model, known), tuple(aliases))


def shared_ties(model: nn.Module, known: Mapping[str, Slot], *, beside: Collection[Tie] = ()) -> tuple[Tie, ...]:
    """The ties of `find_ties`, without aliases; groups that the ties `beside` already connect are left out.

    `known` are `slots(model)`, or `tie_ends(model)` to count the ends of quantised tables.
    """
    shared = [group for group in _holders(known) if len(group) > 1 and not _spanned(group, beside)]
    if not shared:
        return ()
    rank = _ranking(model, known)
    sources = [min(group, key=rank) for group in shared]
    return tuple(
        Tie(slot.name, source.name)
        for group, source in zip(shared, sources, strict=True)
        for slot in group
        if slot is not source
    )


def _holders(known: Mapping[str, Slot]) -> list[list[Slot]]:
    """For every parameter and quantised table, the slots that hold it."""
    holders: dict[int, list[Slot]] = {}
    for slot in known.values():
        if isinstance(slot, TableSlot):
            holders.setdefault(id(slot.tensor), []).append(slot)
            continue
        parameters = slot.module._parameters
        if slot.attribute in parameters:
            holders.setdefault(id(parameters[slot.attribute]), []).append(slot)
    return list(holders.values())


def _spanned(group: list[Slot], ties: Collection[Tie]) -> bool:
    """Whether `ties` make one of the group the source of all others."""
    names = {slot.name for slot in group}
    return any(names == {source} | {tie.target for tie in ties if tie.source == source} & names for source in names)


def _ranking(model: nn.Module, known: Mapping[str, Slot]) -> Callable[[Slot], tuple[bool, bool, bool, int]]:
    """Sort key that puts the source of several names first."""
    declared = declared_ties(model, flag=True, known=known)
    sources, targets = {tie.source for tie in declared}, {tie.target for tie in declared}
    order = {name: at for at, name in enumerate(known)}

    def rank(slot: Slot) -> tuple[bool, bool, bool, int]:
        name = slot.name
        return name not in sources, name in targets, not is_lookup(slot.module), order[name]

    return rank
