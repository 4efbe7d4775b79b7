"""The fates of a tie in a loader, and the facts about a checkpoint that decide them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.quirks import FlagValue, quirks_of
from bowline.families.resolver import FLAG
from bowline.families.transformers_table import load_table
from bowline.tie import Tie

__all__ = [
    "Fate",
    "Outcome",
    "Result",
    "StoredFacts",
    "always_tied",
    "asked_of_newest",
    "misfit",
    "neither",
    "odd_flag",
    "refused_together",
    "takes_no_dictionary",
]


class Fate(StrEnum):
    """The state of a tie's target after a loader has read the checkpoint."""

    TIED = "tied"
    KEPT = "kept"
    RANDOM = "random"
    DROPPED = "dropped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A fate and its reason, which is one phrase."""

    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFacts:
    """The facts about the checkpoint's tensors that a loader can see."""

    stored: frozenset[str]
    equal: Mapping[Tie, bool | None]
    """Whether `torch.equal` would call both ends equal; `None` when the values were not read."""
    equal_when_cast: Mapping[Tie, bool]
    """Whether both ends agree once cast to the shorter of their dtypes."""
    misfits: Mapping[str, frozenset[str]]
    """By version of transformers: stored tensors whose shape is not the one that it builds from the config."""
    safetensors: bool
    nested: bool
    """Whether the pickle holds its tensors in a dictionary inside its dictionary, where no loader looks."""
    dtype_stated: bool
    """Whether the config says which dtype to load."""
    config: Mapping[str, Any]
    """The content of config.json; empty if there is none."""
    weight_files: tuple[str, ...]
    """The files that hold the tensors."""
    shapes: Mapping[str, tuple[int, ...]]
    complete: bool
    """Whether every file of the checkpoint was read; if not, a missing tensor may be in an unread file."""

    def are_equal(self, one: str, other: str) -> bool | None:
        """Whether two stored tensors are equal, as far as the ties that were compared tell; `None` if they do not.

        Equality is transitive: tensors that equal the same tensor are equal, and if one of them differs from another
        tensor, so do the others.
        """
        for tie in (Tie(one, other), Tie(other, one)):
            if tie in self.equal:
                return self.equal[tie]
        alike, others = self._alike(one), self._alike(other)
        if other in alike:
            return True
        pairs = (ends for tie, equal in self.equal.items() if equal is False and (ends := {tie.target, tie.source}))
        return False if any(ends & alike and ends & others for ends in pairs) else None

    def _alike(self, name: str) -> set[str]:
        """The tensors that are known to equal this one."""
        alike, found = {name}, True
        while found:
            found = False
            for tie, equal in self.equal.items():
                if equal and (tie.target in alike) != (tie.source in alike):
                    alike |= {tie.target, tie.source}
                    found = True
        return alike


Result = Iterable[tuple[str, Outcome | None]]
"""By target: the outcome, or `None` if it depends on values that were not read."""


def always_tied(tie: Tie, seen: StoredFacts, why: str) -> Outcome | None:
    """The outcome in a loader that always ties, whatever is stored."""
    if tie.source not in seen.stored:
        return neither() if tie.target not in seen.stored else Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    if tie.target not in seen.stored or seen.equal.get(tie):
        return Outcome(Fate.TIED, why)
    return None if seen.equal.get(tie) is None else Outcome(Fate.DROPPED, why)


def neither() -> Outcome:
    """The outcome if neither tensor of the tie is stored."""
    return Outcome(Fate.RANDOM, "neither tensor is stored")


def asked_of_newest(declared: DeclaredTie) -> bool:
    """The flag as the newest transformers reads it; the other loaders use its configs."""
    return declared.asked[max(declared.asked)] if declared.asked else bool(declared.flag.value)


def misfit(seen: StoredFacts, loader: str, *, among: Collection[str] | None = None) -> Outcome | None:
    """The refusal of a loader whose model has other shapes than stored tensors; `None` if all fit.

    `among`: the tensors whose shape it checks; all, if not given.
    """
    names = seen.misfits.get(loader, frozenset())
    names = names if among is None else names & frozenset(among)
    return Outcome(Fate.REFUSED, f"size mismatch: {', '.join(sorted(names))}") if names else None


def refused_together(outcomes: Result) -> Result:
    """The outcomes, all refused if one is: the loader refuses a whole checkpoint."""
    listed = tuple(outcomes)
    refusal = next((outcome for _, outcome in listed if outcome and outcome.fate is Fate.REFUSED), None)
    return [(target, refusal or outcome) for target, outcome in listed]


def odd_flag(declaration: Declaration) -> Outcome | None:
    """The refusal by transformers 5 of a flag that is neither true nor false; `None` if it accepts the flag.

    It checks the type of the flag only in config classes that declare a default for it.
    """
    name = declaration.family or ""
    family = load_table().family(name) if "transformers-5" in declaration.loaders else None
    defaults = family.flags["transformers-5"] if family else {}
    for path, value in declaration.not_boolean.items():
        kind = FlagValue.NULL if value is None else FlagValue.OTHER
        accepted = path == FLAG and kind in quirks_of(name).accepted_flags
        if defaults.get(path) is not None and not accepted:
            return Outcome(Fate.REFUSED, f"{path} is {shown(value)}, expected true or false")
    return None


def takes_no_dictionary() -> Outcome:
    """The refusal of a pickle whose tensors are in a nested dictionary."""
    return Outcome(Fate.REFUSED, "the pickle holds a nested dictionary where a tensor is expected")
