"""Predicts what vLLM from 0.29 on does with each tie, by the rules in its source (read in 0.33.0), without loading."""

from __future__ import annotations

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
    takes_no_dictionary,
)
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.loader_tables import loader_table

__all__ = ["vllm"]


def vllm(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts vLLM from 0.29: a stored `lm_head.weight` in safetensors outranks the flag, and is tied if equal."""
    known = loader_table("vllm")
    architecture = declaration.architecture
    native, backend = architecture in known["architectures"], architecture in known["transformers_backend"]
    for declared in declaration.ties:
        tie = declared.tie
        if not (native or backend):
            unknown = declaration.inferred  # remote code may run on vLLM's transformers backend
            yield tie.target, None if unknown else Outcome(Fate.REFUSED, f"vLLM has no class {architecture}")
        elif refusal := odd_flag(declaration):
            yield tie.target, refusal
        elif seen.nested:
            yield tie.target, takes_no_dictionary()
        elif refusal := misfit(seen, "transformers-5"):
            yield tie.target, refusal
        elif architecture == "BertForMaskedLM":
            yield tie.target, _vllm_bert(declared, seen)
        elif tie.target != declaration.head:
            yield tie.target, Outcome(Fate.REFUSED, "vLLM does not support this tie")
        elif architecture in known["always_tied"]:
            yield tie.target, always_tied(tie, seen, "vLLM always ties this class")
        elif architecture in known["refuses_stored_head"]:
            refused = Outcome(Fate.REFUSED, "vLLM's class has no parameter for a stored head")
            yield tie.target, refused if tie.target in seen.stored else always_tied(tie, seen, "shares the embedding")
        else:
            never = architecture in known["never_tied"]
            yield tie.target, _vllm_by_flag(declared, seen, asked=asked_of_newest(declared) and not never)


def _vllm_by_flag(declared: DeclaredTie, seen: StoredFacts, *, asked: bool) -> Outcome | None:
    tie, flag = declared.tie, str(declared.flag)
    target_there, source_there = tie.target in seen.stored, tie.source in seen.stored
    if not asked:
        if target_there:
            return Outcome(Fate.KEPT, f"{flag}: loaded as stored")
        return Outcome(Fate.RANDOM, f"{flag}, and it is not stored: left uninitialised, without a warning")
    if not target_there:
        return Outcome(Fate.TIED, f"{flag}: shares {tie.source}") if source_there else neither()
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
        return Outcome(Fate.KEPT, "stored and different from the embedding: left untied, with a warning")
    where = "under names that end in lm_head.weight" if seen.safetensors else "in safetensors files"
    return Outcome(Fate.DROPPED, f"{flag}: overwritten, because vLLM looks for a stored head only {where}")


def _vllm_bert(declared: DeclaredTie, seen: StoredFacts) -> Outcome | None:
    tie = declared.tie
    if tie.target.endswith("bias"):
        return always_tied(tie, seen, "vLLM reads only the head's own bias")
    if tie.target in seen.stored:
        return Outcome(Fate.KEPT, "loaded as stored, whatever the flag says")
    return Outcome(Fate.TIED, f"a copy of {tie.source}") if tie.source in seen.stored else neither()
