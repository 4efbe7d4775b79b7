"""Predicts what llama.cpp's converter and runtime do with each tie, by the rules in their source, without loading."""

from __future__ import annotations

from bowline.auditing.loaders.outcome import (
    Fate,
    Outcome,
    Result,
    StoredFacts,
    always_tied,
    asked_of_newest,
    takes_no_dictionary,
)
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.loader_tables import loader_table

__all__ = ["llama_cpp"]


def llama_cpp(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts llama.cpp's converter and runtime, which keep a stored head of most classes whatever the flag says."""
    architecture = declaration.architecture
    rule = loader_table("llama_cpp")["architectures"].get(architecture)
    for declared in declaration.ties:
        tie = declared.tie
        if rule is None:
            yield tie.target, Outcome(Fate.REFUSED, f"llama.cpp cannot convert {architecture or 'this class'}")
        elif seen.nested:
            yield tie.target, takes_no_dictionary()
        elif rule["head_when_missing"] == "none":
            yield tie.target, Outcome(Fate.DROPPED, "converted to an embedding model, without a head")
        elif tie.target != declaration.head:
            yield tie.target, always_tied(tie, seen, "llama.cpp has one table for both")
        else:
            yield tie.target, _llama_cpp_head(declared, seen, rule["head_when_stored"], rule["head_when_missing"])


def _llama_cpp_head(declared: DeclaredTie, seen: StoredFacts, stored: str, missing: str) -> Outcome | None:
    tie = declared.tie
    if tie.source not in seen.stored:
        return Outcome(Fate.REFUSED, f"{tie.source} is not stored")
    there = tie.target in seen.stored
    if there and stored == "refused":
        return Outcome(Fate.REFUSED, "the converter does not accept a stored head")
    if there and stored == "kept":
        return Outcome(Fate.KEPT, "converted to output.weight, whatever the flag says")
    if there and stored == "dropped-if-flag" and not asked_of_newest(declared):
        return Outcome(Fate.KEPT, f"{declared.flag}: converted to output.weight")
    if missing == "refused":
        return Outcome(Fate.REFUSED, "the runtime requires output.weight, which the converter does not write")
    if not there:
        return Outcome(Fate.TIED, "the runtime falls back to the embedding")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if stored == "dropped-if-equal" and not equal:
        return Outcome(Fate.KEPT, "converted to output.weight, because it differs")
    return always_tied(tie, seen, "the converter drops the stored head")
