"""What each loader does with each tie: the loaders' own steps, run on what was seen instead of on tensors.

transformers' two versions are run step by step (its `tie_weights` in order, with the same three questions); vLLM and
llama.cpp by the rules that their source follows. Nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from bowline import families
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.tie import Tie, TieState

__all__ = ["LOADERS", "Fate", "Outcome", "Seen", "predict"]

LOADERS = ("transformers-4", "transformers-5", "vllm", "llama.cpp")


class Fate(StrEnum):
    """What becomes of a tie's target when a loader has read the checkpoint."""

    TIED = "tied"
    KEPT = "kept"
    RANDOM = "random"
    DROPPED = "dropped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A fate and its reason, one phrase."""

    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a loader can see of the checkpoint's tensors."""

    stored: frozenset[str]
    states: Mapping[Tie, TieState]
    equal: Mapping[Tie, bool | None]
    """Whether `torch.equal` would call both ends equal; `None` when the values were not read."""
    equal_when_cast: Mapping[Tie, bool]
    """Whether both ends agree once cast to the shorter of their dtypes."""
    misshapen: frozenset[str]
    """Stored tensors whose shape is not the one that the config builds."""
    safetensors: bool


def predict(declaration: Declaration, seen: Seen, architecture: str | None) -> dict[str, dict[str, Outcome | None]]:
    """By loader, by target: the outcome, or `None` where it depends on values that were not read."""
    table: dict[str, dict[str, Outcome | None]] = {}
    for loader in LOADERS:
        table[loader] = dict(_RUNNERS[loader](declaration, seen, architecture))
    return table


Result = Iterable[tuple[str, Outcome | None]]


def _transformers(loader: str) -> Callable[[Declaration, Seen, str | None], Result]:
    def run(declaration: Declaration, seen: Seen, architecture: str | None) -> Result:
        ties = declaration.ties
        if architecture is not None and not declaration.inferred and loader not in declaration.loaders:
            reason = f"{architecture} is not in this version"
            return [(tie.tie.target, Outcome(Fate.REFUSED, reason)) for tie in ties]
        if seen.misshapen:
            reason = f"size mismatch: {', '.join(sorted(seen.misshapen))}"
            return [(tie.tie.target, Outcome(Fate.REFUSED, reason)) for tie in ties]
        asked = [tie for tie in ties if tie.asked.get(loader)]
        holders = _tie_five(asked, seen) if loader == "transformers-5" else _tie_four(asked, seen)
        return [(tie.tie.target, _fate(tie, holders, seen, tie in asked)) for tie in ties]

    return run


def _tie_five(asked: list[DeclaredTie], seen: Seen) -> dict[str, str] | None:
    """`{name: the name whose parameter it holds}` after transformers 5's symmetric `tie_weights`.

    Both stored: tied if equal, else left alone. One stored: tied to it. Neither: another target of the same source
    that is stored takes its place. `None` when it hangs on values that were not read.
    """
    holders: dict[str, str] = {}
    pairs = [(declared.tie.target, declared.tie.source, declared.tie) for declared in asked]
    for at, (target, source, tie) in enumerate(pairs):
        target_there, source_there = target in seen.stored, source in seen.stored
        if source_there and target_there:
            equal = seen.equal.get(tie)
            if equal is None:
                return None
            if not equal:
                continue
        elif target_there:
            target, source = source, target
        elif not source_there:
            source = next(
                (other for other, owner, _ in pairs[at + 1 :] if owner == source and other in seen.stored), source
            )
        holders[target] = holders.get(source, source)
    return holders


def _tie_four(asked: list[DeclaredTie], seen: Seen) -> dict[str, str] | None:
    """The same after transformers 4's: the target becomes the source, whatever the file holds."""
    holders: dict[str, str] = {}
    for declared in asked:
        source = declared.tie.source
        holders[declared.tie.target] = holders.get(source, source)
    return holders


def _fate(declared: DeclaredTie, holders: dict[str, str] | None, seen: Seen, asked: bool) -> Outcome | None:
    tie = declared.tie
    if holders is None and asked:
        return None
    holders = holders or {}
    holder, source_holder = holders.get(tie.target, tie.target), holders.get(tie.source, tie.source)
    flag = str(declared.flag)
    if holder == source_holder:
        if holder not in seen.stored:
            return Outcome(Fate.RANDOM, "neither end is stored")
        if tie.target in seen.stored and holder != tie.target and seen.equal.get(tie) is not True:
            if seen.equal.get(tie) is None:
                return None
            return Outcome(Fate.DROPPED, f"{flag}: overwritten by {tie.source}")
        return Outcome(Fate.TIED, _why_tied(declared, seen, flag))
    if tie.target in seen.stored:
        if asked:
            return Outcome(Fate.KEPT, "stored, and differs from the source: a warning, and no tie")
        return Outcome(Fate.KEPT, f"{flag}: loaded as stored")
    return Outcome(Fate.RANDOM, f"{flag}, and nothing stored: drawn afresh")


def _why_tied(declared: DeclaredTie, seen: Seen, flag: str) -> str:
    tie = declared.tie
    if tie.target in seen.stored and tie.source in seen.stored:
        return f"{flag}: the stored copy is equal"
    if tie.target in seen.stored:
        return f"{flag}: {tie.source} is not stored and takes the target"
    return f"{flag}: shares {tie.source}"


def _vllm(declaration: Declaration, seen: Seen, architecture: str | None) -> Result:
    """vLLM from 0.29: a stored `lm_head.weight` in safetensors outranks the flag, and is re-tied when it is equal."""
    known = _knowledge("vllm.json")
    native, backend = architecture in known["architectures"], architecture in known["transformers_backend"]
    for declared in declaration.ties:
        tie = declared.tie
        if not (native or backend):
            yield tie.target, Outcome(Fate.REFUSED, f"vLLM has no {architecture or 'such class'}")
        elif seen.misshapen:
            yield tie.target, Outcome(Fate.REFUSED, f"size mismatch: {', '.join(sorted(seen.misshapen))}")
        elif architecture == "BertForMaskedLM":
            yield tie.target, _vllm_bert(declared, seen)
        elif tie.target != declaration.head:
            yield tie.target, Outcome(Fate.REFUSED, "vLLM has no such tie")
        elif architecture in known["always_tied"]:
            yield tie.target, _always_tied(tie, seen, "vLLM always ties this class")
        elif architecture in known["refuses_stored_head"]:
            refused = Outcome(Fate.REFUSED, "vLLM's class has no head to load it into")
            yield tie.target, refused if tie.target in seen.stored else _always_tied(tie, seen, "shares the embedding")
        else:
            never = architecture in known["never_tied"]
            yield tie.target, _vllm_by_flag(declared, seen, asked=_asked_of_newest(declared) and not never)


def _vllm_by_flag(declared: DeclaredTie, seen: Seen, *, asked: bool) -> Outcome | None:
    tie, flag = declared.tie, str(declared.flag)
    target_there, source_there = tie.target in seen.stored, tie.source in seen.stored
    if not asked:
        if target_there:
            return Outcome(Fate.KEPT, f"{flag}: loaded as stored")
        return Outcome(Fate.RANDOM, f"{flag}, and nothing stored: memory left as it was, without a word")
    if not target_there:
        return Outcome(Fate.TIED, f"{flag}: shares {tie.source}") if source_there else _neither()
    noticed = tie.target.endswith("lm_head.weight") and seen.safetensors
    if not source_there:
        if noticed:
            return Outcome(Fate.KEPT, f"loaded; {tie.source} is left uninitialised")
        return Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if equal or seen.equal_when_cast.get(tie):
        return Outcome(Fate.TIED, f"{flag}: the stored copy is equal")
    if noticed:
        return Outcome(Fate.KEPT, "stored, and differs from the embedding: a warning, and no tie")
    where = "the name does not end in lm_head.weight" if seen.safetensors else "only safetensors are looked into"
    return Outcome(Fate.DROPPED, f"{flag}: overwritten, since {where}")


def _vllm_bert(declared: DeclaredTie, seen: Seen) -> Outcome | None:
    tie = declared.tie
    if tie.target.endswith("bias"):
        return _always_tied(tie, seen, "vLLM reads the head's own bias only")
    if tie.target in seen.stored:
        return Outcome(Fate.KEPT, "loaded as stored, whatever the flag says")
    return Outcome(Fate.TIED, f"a copy of {tie.source}") if tie.source in seen.stored else _neither()


def _llama_cpp(declaration: Declaration, seen: Seen, architecture: str | None) -> Result:
    """llama.cpp's converter, then its runtime: most keep a stored head whatever the flag says."""
    rule = _knowledge("llama_cpp.json")["architectures"].get(architecture)
    for declared in declaration.ties:
        tie = declared.tie
        if rule is None:
            yield tie.target, Outcome(Fate.REFUSED, f"llama.cpp cannot convert {architecture or 'this class'}")
        elif tie.target != declaration.head:
            yield tie.target, _always_tied(tie, seen, "llama.cpp knows one table")
        else:
            yield tie.target, _llama_cpp_head(declared, seen, rule["head_when_stored"], rule["head_when_missing"])


def _llama_cpp_head(declared: DeclaredTie, seen: Seen, stored: str, missing: str) -> Outcome | None:
    tie = declared.tie
    if tie.source not in seen.stored:
        return Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    if missing == "none":
        return Outcome(Fate.DROPPED, "converted to an embedding model, without a head")
    there = tie.target in seen.stored
    if there and stored == "refused":
        return Outcome(Fate.REFUSED, "the converter has no place for a stored head")
    if there and stored == "kept":
        return Outcome(Fate.KEPT, "converted to output.weight, whatever the flag says")
    if there and stored == "dropped-if-flag" and not _asked_of_newest(declared):
        return Outcome(Fate.KEPT, f"{declared.flag}: converted to output.weight")
    if missing == "refused":
        return Outcome(Fate.REFUSED, "the runtime wants an output.weight and gets none")
    if not there:
        return Outcome(Fate.TIED, "the runtime falls back to the embedding")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if stored == "dropped-if-equal" and not equal:
        return Outcome(Fate.KEPT, "converted to output.weight, since it differs")
    return _always_tied(tie, seen, "the converter drops the stored head")


def _always_tied(tie: Tie, seen: Seen, why: str) -> Outcome | None:
    if tie.source not in seen.stored:
        return _neither() if tie.target not in seen.stored else Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    if tie.target not in seen.stored or seen.equal.get(tie):
        return Outcome(Fate.TIED, why)
    return None if seen.equal.get(tie) is None else Outcome(Fate.DROPPED, why)


def _neither() -> Outcome:
    return Outcome(Fate.RANDOM, "neither end is stored")


def _asked_of_newest(declared: DeclaredTie) -> bool:
    return declared.asked[max(declared.asked)] if declared.asked else bool(declared.flag.value)


@cache
def _knowledge(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((Path(families.__file__).parent / name).read_bytes())
    return content


_RUNNERS: dict[str, Callable[[Declaration, Seen, str | None], Result]] = {
    "transformers-4": _transformers("transformers-4"),
    "transformers-5": _transformers("transformers-5"),
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
}
