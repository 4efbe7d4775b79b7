"""Predicts what transformers 4 and 5 do with each tie, by running the rules of their `tie_weights` on facts.

`make sweep` compares every prediction of this file with a real load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bowline.auditing.loaders.outcome import Fate, Outcome, Result, StoredFacts, misfit, odd_flag, takes_no_dictionary
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.tie import Tie

__all__ = ["transformers_4", "transformers_5"]

Holders = dict[str, str]
"""By name: the name whose parameter it holds after loading. A name that is not a key holds its own."""


def transformers_4(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts version 4, which makes every tie that the config asks for, whatever the file holds."""
    found = replace(
        seen,
        stored=seen.stored - declaration.prefixed,
        misfits={loader: names - declaration.prefixed for loader, names in seen.misfits.items()},
    )
    return _after_loading("transformers-4", declaration, found, _tie_whatever_is_stored(_made(declaration, 4)))


def transformers_5(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts version 5, which makes a tie only if the stored tensors allow it."""
    return _after_loading("transformers-5", declaration, seen, _tie_what_agrees(_made(declaration, 5), seen))


def _made(declaration: Declaration, version: int) -> Sequence[Tie]:
    return declaration.made.get(f"transformers-{version}", ())


def _tie_whatever_is_stored(made: Sequence[Tie]) -> Holders:
    return {tie.target: tie.source for tie in made}


def _tie_what_agrees(made: Sequence[Tie], seen: StoredFacts) -> Holders | None:
    """The parameter that each name holds after transformers 5 has tied; `None` if that depends on unread values.

    If both tensors are stored, they are tied if they are equal. If one is stored, the other is tied to it. If neither
    is, another stored target of the same source takes the source's place.
    """
    holders: Holders = {}
    there = set(seen.stored)
    for at, tie in enumerate(made):
        target, source = tie.target, tie.source
        if source in there and target in there:
            equal = seen.are_equal(target, holders.get(source, source))
            if equal is None:
                return None
            if not equal:
                continue
        elif target in there:
            target, source = source, target
        elif source not in there:
            others = (other.target for other in made[at + 1 :] if other.source == source)
            source = next((other for other in others if other in there), source)
        holders[target] = holders.get(source, source)
        if source in there:
            there.add(target)
    return holders


def _after_loading(loader: str, declaration: Declaration, seen: StoredFacts, holders: Holders | None) -> Result:
    unknown = not declaration.inferred and loader not in declaration.loaders
    for declared in declaration.ties:
        if unknown:
            yield declared.tie.target, Outcome(Fate.REFUSED, f"this version has no class {declaration.architecture}")
        elif loader == "transformers-5" and (refusal := odd_flag(declaration)):
            yield declared.tie.target, refusal
        elif seen.nested:
            yield declared.tie.target, _nested(loader, seen)
        elif refusal := misfit(seen, loader):
            yield declared.tie.target, refusal
        elif holders is None:
            yield declared.tie.target, None
        else:
            yield declared.tie.target, _fate(declared, loader, holders, seen)


def _nested(loader: str, seen: StoredFacts) -> Outcome:
    """The outcome for nested tensors: version 5 fails if the config has no dtype, since it reads the first entry's."""
    if loader == "transformers-5" and not seen.dtype_stated:
        return takes_no_dictionary()
    return Outcome(Fate.RANDOM, "the tensors are in a nested dictionary, so none is found")


def _fate(declared: DeclaredTie, loader: str, holders: Holders, seen: StoredFacts) -> Outcome | None:
    tie = declared.tie
    flag = "always tied" if loader in declared.unconditional else str(declared.flag)
    holder = holders.get(tie.target, tie.target)
    if holder == holders.get(tie.source, tie.source):
        if holder not in seen.stored and tie.target in seen.stored:
            return Outcome(Fate.RANDOM, f"{flag}: overwritten by {holder}, which is not stored")
        if holder not in seen.stored:
            return Outcome(Fate.RANDOM, "neither tensor is stored")
        equal = tie.target not in seen.stored or holder == tie.target or seen.are_equal(tie.target, holder)
        if equal is None:
            return None
        if equal:
            return Outcome(Fate.TIED, _why_tied(tie, seen, flag, holder))
        return Outcome(Fate.DROPPED, f"{flag}: overwritten by {holder}")
    if tie.target not in seen.stored:
        return Outcome(Fate.RANDOM, f"{flag}, and it is not stored: drawn at random")
    if declared.asked.get(loader):
        return Outcome(Fate.KEPT, f"{flag}, but the stored tensors differ: left untied, with a warning")
    return Outcome(Fate.KEPT, f"{flag}: loaded as stored")


def _why_tied(tie: Tie, seen: StoredFacts, flag: str, holder: str) -> str:
    if tie.source in seen.stored and holder == tie.target and not seen.equal.get(tie):
        return f"{flag}: {tie.target} is used for both"
    if tie.target in seen.stored and tie.source in seen.stored:
        return f"{flag}: the stored copy is equal"
    if tie.target in seen.stored:
        return f"{flag}: {tie.source} is not stored and shares this tensor"
    return f"{flag}: shares {tie.source}"
