"""Reads `tables/transformers.json`, which `tools/generate_families.py` makes; it is never edited by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bowline.tie import Tie

__all__ = [
    "LOADER_VERSIONS",
    "ArchitectureFacts",
    "Declared",
    "DeclaredGate",
    "ModelFamily",
    "Gate",
    "Table",
    "load_table",
    "lookup",
]

LOADER_VERSIONS: Mapping[str, str] = {"transformers-4": "4", "transformers-5": "5"}
"""The loaders whose declarations are in the table, and the key of each there."""

ABSENT: Any = object()


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a config, or `ABSENT`.

    Example:
        >>> lookup({"text_config": {"vocab_size": 7}}, "text_config.vocab_size")
        7
    """
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The keys of `config.json` that decide whether a tie is made, found by trying values of them.

    No paths: the tie is made whatever the config says. One path: that key, or `default` when it is absent. Several:
    `rule` says how they combine, `"first"` (the first that is present), `"any"`, `"all"` or, where none of these
    fits, `"table"`: one character per path, `T`, `F` or `-` for absent.
    """

    paths: tuple[str, ...]
    default: bool
    rule: str = "first"
    table: Mapping[str, bool] = field(default_factory=dict)

    def decide(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        """Whether this config asks for the tie, and the path of the key that said so (`None`: the default)."""
        stated = {path: bool(value) for path in self.paths if (value := lookup(config, path)) is not ABSENT}
        if not stated:
            return self.default, None
        first_path, first = next(iter(stated.items()))
        if self.rule == "first":
            return first, first_path
        if self.rule == "table":
            key = "".join("-" if path not in stated else "T" if stated[path] else "F" for path in self.paths)
            return self.table.get(key, first), first_path
        wanted = self.rule == "any"
        for path, value in stated.items():
            if value is wanted:
                return value, path
        return first, first_path


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredGate:
    """A tie of a class and the gate before it; `flat` is the gate in a config that has no `text_config`.

    `keeps_target` is true where a load that finds values for the target gives them to the source.
    """

    tie: Tie
    gate: Gate
    flat: Gate | None = None
    keeps_target: bool = False

    def gate_in(self, config: Mapping[str, Any]) -> Gate:
        """The gate that counts in the layout of this config."""
        return self.flat if self.flat is not None and "text_config" not in config else self.gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The ties and vocabulary tensors that one class declares in one version of transformers, by their names on disk.

    `vocabulary` maps tensors to the axis that runs over the family's `vocab_size`, `other_vocabularies` further paths
    of the config to the tensors that follow them. `longer` says by how much an axis exceeds its size where it does;
    `None` is for an axis that follows it in another way.
    """

    ties: tuple[DeclaredGate, ...]
    embedding: str | None
    head: str | None
    vocabulary: Mapping[str, int]
    longer: Mapping[str, int | None]
    other_vocabularies: Mapping[str, Mapping[str, int]]
    module_names: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureFacts:
    """A class as `config.json` names it, with what it declares in each version that has it."""

    name: str
    family: str
    prefix: str
    declared: Mapping[str, Declared]
    """By loader, `"transformers-4"` and `"transformers-5"`; a loader that lacks the class is absent."""

    @property
    def newest(self) -> Declared:
        """The declaration of the newest version that has the class."""
        return self.declared[max(self.declared)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A `model_type`: the keys of its sizes, and the value of the flag in a config that does not state it."""

    name: str
    vocab_size: str | None
    hidden_size: str | None
    flags: Mapping[str, Mapping[str, bool | None]]


class Table:
    """The generated table, parsed one class at a time: an audit needs one class of two thousand."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.versions: Mapping[str, str] = {
            loader: content["transformers"][key] for loader, key in LOADER_VERSIONS.items()
        }

    def architecture(self, name: str) -> ArchitectureFacts | None:
        """The class of that name, or `None`."""
        raw = self._content["classes"].get(name)
        return _architecture(name, raw) if raw is not None else None

    def family(self, name: str) -> ModelFamily | None:
        """The family of that `model_type`, or `None`."""
        raw = self._content["families"].get(name)
        if raw is None:
            return None
        flags = {loader: raw["flags"].get(key, {}) for loader, key in LOADER_VERSIONS.items()}
        return ModelFamily(name=name, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], flags=flags)

    def architectures_of(self, family: str) -> tuple[str, ...]:
        """The classes of a family, by name."""
        return tuple(name for name, raw in self._content["classes"].items() if raw["family"] == family)

    def __iter__(self) -> Any:
        return iter(self._content["classes"])


@cache
def load_table() -> Table:
    """The table that comes with this release."""
    return Table(json.loads((Path(__file__).parent / "tables" / "transformers.json").read_bytes()))


def _architecture(name: str, raw: Mapping[str, Any]) -> ArchitectureFacts:
    declared: dict[str, Declared] = {}
    for loader, key in LOADER_VERSIONS.items():
        one = raw["5"] if raw[key] == "=" else raw[key]
        if one is not None:
            declared[loader] = _declared(one)
    return ArchitectureFacts(name=name, family=raw["family"], prefix=raw["prefix"], declared=declared)


def _declared(raw: Mapping[str, Any]) -> Declared:
    return Declared(
        ties=tuple(
            DeclaredGate(
                tie=Tie(tie["target"], tie["source"]),
                gate=_gate(tie["gate"]),
                flat=_gate(tie["flat_gate"]) if "flat_gate" in tie else None,
                keeps_target=tie.get("owner") == "target",
            )
            for tie in raw["ties"]
        ),
        embedding=raw["embedding"],
        head=raw["head"],
        vocabulary=raw["vocabulary"],
        longer=raw.get("longer", {}),
        other_vocabularies=raw.get("other_vocabularies", {}),
        module_names=raw.get("module_names", {}),
    )


def _gate(raw: Mapping[str, Any]) -> Gate:
    return Gate(
        paths=tuple(raw["paths"]),
        default=raw["default"],
        rule=raw.get("rule", "first"),
        table=raw.get("table", {}),
    )
