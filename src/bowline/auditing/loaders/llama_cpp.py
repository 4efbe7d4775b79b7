"""Predicts what llama.cpp's converter and runtime do with each tie, by the rules in their source.

`make sweep-llama-cpp` compares every prediction of this file with a real conversion and a real load.
"""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.loaders.outcome import (
    Fate,
    Outcome,
    Result,
    StoredFacts,
    always_tied,
    asked_of_newest,
    misfit,
    refused_together,
    takes_no_dictionary,
)
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.loader_tables import loader_table
from bowline.families.resolver import FLAG
from bowline.families.transformers_table import lookup
from bowline.tie import Tie

__all__ = ["llama_cpp"]

NO_HEAD = "converted to an embedding model, without a head"
NOT_READ = ("awq", "bitsandbytes", "torchao")
"""The `quant_method` of checkpoints that the converter refuses; it was run on one of each."""
ONE_TABLE = ("t5",)
"""GGUF architectures whose converter takes the first of several input embeddings as the table of both stacks."""


def llama_cpp(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts llama.cpp's converter and runtime, which keep a stored head of most classes whatever the flag says.

    The converter and the runtime refuse a whole checkpoint, so one refusal holds for every tie.
    """
    return refused_together(_each_tie(declaration, seen))


def _each_tie(declaration: Declaration, seen: StoredFacts) -> Iterator[tuple[str, Outcome | None]]:
    architecture = declaration.architecture
    rule = loader_table("llama_cpp")["architectures"].get(architecture)
    method = lookup(seen.config, "quantization_config.quant_method")
    for declared in declaration.ties:
        tie = declared.tie
        if rule is None:
            refused = Outcome(Fate.REFUSED, f"llama.cpp cannot convert {architecture or 'this class'}")
            yield tie.target, None if declaration.inferred else refused
            continue
        tables = _tables(declaration, tie, rule["gguf"])
        lacking = [key for key in rule.get("needs", ()) if key not in seen.config]
        if seen.nested:
            yield tie.target, takes_no_dictionary()
        elif declaration.prefixed:
            yield tie.target, Outcome(Fate.REFUSED, f"the converter does not know {min(declaration.prefixed)}")
        elif method in NOT_READ:
            yield tie.target, Outcome(Fate.REFUSED, f"the converter does not read weights quantised by {method}")
        elif lacking:
            yield tie.target, Outcome(Fate.REFUSED, f"the converter needs {lacking[0]} in config.json")
        elif tie.target.endswith("bias") and rule["head_when_missing"] == "none":
            yield tie.target, Outcome(Fate.DROPPED, NO_HEAD)
        elif not any(table in seen.stored for table in tables):
            yield tie.target, Outcome(Fate.REFUSED, f"{tie.source} is not stored")
        elif refusal := misfit(seen, "transformers-5", among=tables):
            yield tie.target, refusal
        elif rule["head_when_missing"] == "none":
            yield tie.target, Outcome(Fate.DROPPED, NO_HEAD)
        elif tie.target != declaration.head:
            yield tie.target, _other_table(tie, seen, tables)
        else:
            yield tie.target, _head(declaration, declared, seen, rule["head_when_stored"], rule["head_when_missing"])


def _tables(declaration: Declaration, tie: Tie, gguf: str) -> tuple[str, ...]:
    """The names that the converter takes the table from, in the order of a file."""
    if gguf not in ONE_TABLE:
        return (tie.source,)
    others = (one.tie.target for one in declaration.ties if one.tie.target != declaration.head)
    return tuple(sorted({tie.source, *others}))


def _other_table(tie: Tie, seen: StoredFacts, tables: tuple[str, ...]) -> Outcome | None:
    """The outcome of a tie between two input embeddings: the first stored one serves as both."""
    used = next((table for table in tables if table in seen.stored), tie.source)
    if used == tie.source or used not in tables:
        return always_tied(tie, seen, "llama.cpp has one table for both")
    if tie.target not in seen.stored:
        return Outcome(Fate.TIED, f"llama.cpp has one table for both: {used}")
    equal = tie.target == used or seen.are_equal(tie.target, used)
    if equal is None:
        return None
    return Outcome(Fate.TIED if equal else Fate.DROPPED, f"llama.cpp has one table for both: {used}, the first stored")


def _head(
    declaration: Declaration, declared: DeclaredTie, seen: StoredFacts, stored: str, missing: str
) -> Outcome | None:
    tie = declared.tie
    there = tie.target in seen.stored
    flag = declaration.levels.get(f"text_config.{FLAG}", asked_of_newest(declared))
    if there and stored == "refused":
        return Outcome(Fate.REFUSED, "the converter does not accept a stored head")
    if there and (stored == "kept" or (stored == "dropped-if-flag" and not flag)):
        whatever = "whatever the flag says" if stored == "kept" else "since config.json does not say tied"
        return misfit(seen, "transformers-5", among=(tie.target,)) or Outcome(
            Fate.KEPT, f"converted to output.weight, {whatever}"
        )
    if missing == "refused":
        return Outcome(Fate.REFUSED, "the runtime requires output.weight, which the converter does not write")
    if not there:
        return Outcome(Fate.TIED, "the runtime falls back to the embedding")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if stored == "dropped-if-equal" and not equal:
        return misfit(seen, "transformers-5", among=(tie.target,)) or Outcome(
            Fate.KEPT, "converted to output.weight, because it differs"
        )
    equal = equal or seen.equal_when_cast.get(tie, False)
    return Outcome(Fate.TIED if equal else Fate.DROPPED, "the converter drops the stored head")
