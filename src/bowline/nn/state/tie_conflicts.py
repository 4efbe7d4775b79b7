"""Decides which value a tied matrix takes when a state dict holds both ends of the tie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.ties.conflict_policy import ConflictOrUntie, check_policy, expect_equal_targets
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import shared_ties
from bowline.nn.ties.tensor_comparison import difference, state_of
from bowline.nn.tree.slots import Slot
from bowline.tie import Tie, TieState, owner_chain

__all__ = ["Resolution", "resolve_ties"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The values that the state gives to the model's tied matrices.

    `values`: by source, the tensor that all names of its matrix take. `names`: by source, those names. `apart`: ties
    whose ends have different values in the state, and that are to be undone.
    """

    values: Mapping[str, torch.Tensor]
    names: Mapping[str, tuple[str, ...]]
    apart: tuple[Tie, ...]


def resolve_ties(
    model: nn.Module, known: Mapping[str, Slot], state: Mapping[str, torch.Tensor], on_conflict: ConflictOrUntie
) -> Resolution:
    """Compare the ends that `state` holds of every tie that `model` has or declares. `known` are `slots(model)`.

    Raises:
        TieError: two ends differ and `on_conflict` is `"raise"`.
    """
    check_policy(on_conflict, ConflictOrUntie)
    values: dict[str, torch.Tensor] = {}
    names: dict[str, tuple[str, ...]] = {}
    apart: list[Tie] = []
    for source, targets in _knots(model, known).items():
        held = [name for name in (source, *targets) if name in state]
        if not held:
            continue
        chosen = held[0]
        together, differing = [source, *targets], []
        for name in held[1:]:
            if not _same(state[name], state[chosen]):
                differing.append(name)
        if differing:
            chosen = _choose(source, chosen, differing, state, on_conflict)
            if on_conflict == "untie":
                apart += [Tie(name, source) for name in differing]
                together = [name for name in together if name not in differing]
        values[source] = state[chosen]
        names[source] = tuple(together)
    return Resolution(values, names, tuple(apart))


def _knots(model: nn.Module, known: Mapping[str, Slot]) -> dict[str, list[str]]:
    """The names of each shared matrix, by its source: what is shared now, and what is declared to be."""
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        return owner_chain(name, roots)[-1]

    declared = declared_ties(model, known=known)
    for tie in (*declared, *shared_ties(model, known, beside=declared)):
        if not {tie.target, tie.source} <= known.keys() or root(tie.target) == root(tie.source):
            continue
        if known[tie.target].is_parameter and known[tie.source].is_parameter:  # a buffer cannot be tied
            roots[root(tie.target)] = root(tie.source)
    knots: dict[str, list[str]] = {}
    for name in roots:
        knots.setdefault(root(name), []).append(name)
    return knots


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is type(other) and getattr(one, "placements", None) == getattr(other, "placements", None) is not None:
        one, other = one.to_local(), other.to_local()  # type: ignore[attr-defined]  # shards of one layout
    return state_of(one, other) in (TieState.SHARED, TieState.ALIAS, TieState.EQUAL)


def _choose(
    source: str, first: str, differing: list[str], state: Mapping[str, torch.Tensor], on_conflict: ConflictOrUntie
) -> str:
    if on_conflict == "raise":
        other = differing[0]
        raise TieError(
            f"{other} <- {source}: the model has one matrix, but the state has two different ones, {other} and "
            f"{first}: {_how(state[other], state[first])}",
            help='on_conflict="untie" keeps both; "source" keeps the embedding, "target" the head',
        )
    if on_conflict == "target":
        expect_equal_targets(
            source,
            [(name, state[name]) for name in differing],
            help='on_conflict="untie" keeps all',
            differ=lambda one, other: not _same(one, other),
        )
        return differing[0]
    return first


def _how(one: torch.Tensor, other: torch.Tensor) -> str:
    for what, a, b in (("shape", tuple(one.shape), tuple(other.shape)), ("dtype", one.dtype, other.dtype)):
        if a != b:
            return f"{what} {a} and {b}"
    return str(difference(one, other))
