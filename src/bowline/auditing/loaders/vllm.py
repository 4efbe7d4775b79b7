"""Predicts what vLLM does with each tie, from 0.29 on and before, by the rules in its source.

`make sweep-vllm` compares every prediction of this file with a real load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bowline.auditing.loaders.outcome import (
    Fate,
    Outcome,
    Result,
    StoredFacts,
    always_tied,
    asked_of_newest,
    misfit,
    neither,
    odd_flag,
    refused_together,
    takes_no_dictionary,
)
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.loader_tables import loader_table
from bowline.families.resolver import FLAG
from bowline.families.transformers_table import load_table

__all__ = ["vllm", "vllm_0_28"]

TEXT_FLAG = f"text_config.{FLAG}"
CONFIGS = "transformers-5"
"""vLLM reads configs by the classes of this version."""


class _Flag(NamedTuple):
    """The flag as vLLM takes it.

    `tied`: whether the class shares the embedding. `looks`: whether vLLM looks for a stored head, to untie it.
    """

    tied: bool
    looks: bool


def vllm(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts vLLM from 0.29: a stored `lm_head.weight` in safetensors outranks the flag, and is tied if equal.

    A load is refused as a whole, so one refusal holds for every tie.
    """
    return refused_together(_each_tie(declaration, seen, looks=True))


def vllm_0_28(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts vLLM before 0.29, which goes by the flag alone and looks for no stored head.

    Only the classes that were run in 0.28.0 have an outcome.
    """
    known = loader_table("vllm")["before_0_29"]
    if declaration.architecture not in known["run"]:
        return [(declared.tie.target, None) for declared in declaration.ties]
    outcomes = list(refused_together(_each_tie(declaration, seen, looks=False)))
    head = next((declared for declared in declaration.ties if declared.tie.target == declaration.head), None)
    if head is None:
        return outcomes
    if declaration.architecture in known["refuses_untied"] and not asked_of_newest(head):
        outcomes.append((head.tie.target, Outcome(Fate.REFUSED, f"{head.flag}, but vLLM's class is always tied")))
    elif declaration.architecture in known["loads_head_over_embedding"] and head.tie.target in seen.stored:
        if refusal := misfit(seen, CONFIGS, among=(head.tie.target,)):
            outcomes.append((head.tie.target, refusal))
        elif not seen.safetensors:  # which of the two is loaded last hangs on their order in the file
            outcomes.append((head.tie.target, None))
    return refused_together(dict(outcomes).items())


def _each_tie(declaration: Declaration, seen: StoredFacts, *, looks: bool) -> Iterator[tuple[str, Outcome | None]]:
    known = loader_table("vllm")
    architecture = declaration.architecture
    native, backend = architecture in known["architectures"], architecture in known["transformers_backend"]
    for declared in declaration.ties:
        tie = declared.tie
        is_head = tie.target == declaration.head
        if not (native or backend):
            unknown = declaration.inferred  # remote code may run on vLLM's transformers backend
            yield tie.target, None if unknown else Outcome(Fate.REFUSED, f"vLLM has no class {architecture}")
        elif refusal := odd_flag(declaration):
            yield tie.target, refusal
        elif seen.nested:
            yield tie.target, takes_no_dictionary()
        elif declaration.prefixed:
            yield tie.target, Outcome(Fate.REFUSED, f"vLLM does not know {min(declaration.prefixed)}")
        elif refusal := misfit(seen, CONFIGS, among=(tie.source,)):
            yield tie.target, refusal
        elif architecture in known["embedding_models"]:
            yield tie.target, Outcome(Fate.DROPPED, "loaded as an embedding model, without a head")
        elif architecture == "BertForMaskedLM":
            yield tie.target, _bert(declared, seen)
        elif not is_head and backend:
            yield tie.target, always_tied(tie, seen, "tied by transformers' own class")
        elif not is_head:
            yield tie.target, Outcome(Fate.REFUSED, "vLLM does not support this tie")
        elif architecture in known["refuses_stored_head"] and tie.target in seen.stored:
            yield tie.target, Outcome(Fate.REFUSED, "vLLM's class has no parameter for a stored head")
        elif architecture in known["always_tied"]:
            yield tie.target, _without_head(architecture, declared, seen)
        else:
            flag = _flag(declaration, declared)
            yield tie.target, _by_flag(declaration, declared, seen, flag if looks else flag._replace(looks=False))


def _flag(declaration: Declaration, declared: DeclaredTie) -> _Flag:
    """The flag at the top and in the text config, as the class reads it.

    vLLM looks for a stored head if the flag at the top is true. Most classes with a text config get the top's flag
    copied into it; some read the text config's own. Where the config's class makes one flag of both, that holds.
    """
    known, architecture = loader_table("vllm"), declaration.architecture
    family = load_table().family(declaration.family or "")
    defaults = family.flags.get(CONFIGS, {}) if family else {}
    asked = asked_of_newest(declared)
    looks = asked
    reads_text = architecture in known["reads_text_flag"]
    if not declaration.levels and architecture in known["untied_by_default"]:
        asked = looks = False
    elif reads_text or (TEXT_FLAG in {*declaration.levels, *defaults} and not {FLAG, TEXT_FLAG} <= {*declared.paths}):
        top, text = (declaration.levels.get(path, defaults.get(path)) for path in (FLAG, TEXT_FLAG))
        asked, looks = bool(text if reads_text or top is None else top), bool(top)
    return _Flag(tied=asked and architecture not in known["never_tied"], looks=looks)


def _by_flag(declaration: Declaration, declared: DeclaredTie, seen: StoredFacts, flag: _Flag) -> Outcome | None:
    tie, stated, architecture = declared.tie, str(declared.flag), declaration.architecture
    target_there, source_there = tie.target in seen.stored, tie.source in seen.stored
    noticed = flag.looks and tie.target.endswith("lm_head.weight") and seen.safetensors
    known = loader_table("vllm")
    if flag.tied and not (noticed and target_there) and architecture in known["refuses_tied"]:
        return Outcome(Fate.REFUSED, f"{stated}, but vLLM's class takes no tied head")
    if not target_there:
        if not flag.tied:
            return Outcome(Fate.RANDOM, f"{stated}, and it is not stored: left uninitialised, without a warning")
        return Outcome(Fate.TIED, f"{stated}: shares {tie.source}") if source_there else neither()
    if noticed or not flag.tied:
        if refusal := misfit(seen, CONFIGS, among=(tie.target,)):
            return refusal
        if not source_there:
            return Outcome(Fate.KEPT, f"loaded; {tie.source} is left uninitialised")
        if not noticed:
            return Outcome(Fate.KEPT, f"{stated}: loaded as stored")
    elif not source_there and architecture in known["transformers_backend"]:
        return Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    elif not source_there:
        return Outcome(Fate.RANDOM, f"{stated}: shares {tie.source}, which is not stored: left uninitialised")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if equal or seen.equal_when_cast.get(tie):
        if architecture in known["keeps_equal_copy"]:
            return Outcome(Fate.KEPT, "loaded as stored: the class has two embeddings, and its head is not tied again")
        return Outcome(Fate.TIED, f"{stated}: the stored copy is equal")
    if noticed:
        return Outcome(Fate.KEPT, "stored and different from the embedding: left untied, with a warning")
    if not flag.looks:
        return Outcome(Fate.DROPPED, f"{stated}: overwritten, whatever is stored")
    where = "under names that end in lm_head.weight" if seen.safetensors else "in safetensors files"
    return Outcome(Fate.DROPPED, f"{stated}: overwritten, because vLLM looks for a stored head only {where}")


def _without_head(architecture: str | None, declared: DeclaredTie, seen: StoredFacts) -> Outcome | None:
    """The outcome in a class that computes its logits with the embedding and skips a stored head of any shape."""
    tie, why = declared.tie, "vLLM always ties this class"
    if tie.source not in seen.stored:
        if architecture in loader_table("vllm")["refuses_missing_embedding"]:
            return Outcome(Fate.REFUSED, f"{tie.source} is not stored")
        return Outcome(Fate.RANDOM, f"{tie.source} is not stored: left uninitialised, without a warning")
    if tie.target not in seen.stored or seen.equal_when_cast.get(tie):
        return Outcome(Fate.TIED, why)
    return always_tied(tie, seen, why)


def _bert(declared: DeclaredTie, seen: StoredFacts) -> Outcome | None:
    tie = declared.tie
    if tie.source not in seen.stored:
        kept = Outcome(Fate.KEPT, f"loaded; {tie.source} is left uninitialised")
        return kept if tie.target in seen.stored else neither()
    if tie.target.endswith("bias"):
        equal_once_cast = tie.target in seen.stored and seen.equal_when_cast.get(tie)
        why = "vLLM reads only the head's own bias"
        return Outcome(Fate.TIED, why) if equal_once_cast else always_tied(tie, seen, why)
    if tie.target in seen.stored:
        return misfit(seen, CONFIGS, among=(tie.target,)) or Outcome(
            Fate.KEPT, "loaded as stored, whatever the flag says"
        )
    return Outcome(Fate.TIED, f"a copy of {tie.source}")
