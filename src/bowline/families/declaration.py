"""The record of what a model's class and config declare about its ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bowline.tie import Tie

__all__ = ["Declaration", "DeclaredTie", "Flag", "StatedSize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """`tie_word_embeddings` as it takes effect.

    `path` is the dotted key of `config.json` that decided it; `None` means that the key is absent and the value is
    the default. `value` is `None` when the key is absent and the loaders' defaults differ, or nothing is known.
    """

    value: bool | None
    path: str | None

    def __str__(self) -> str:
        if self.path is None:
            default = "" if self.value is None else f" (default {str(self.value).lower()})"
            return f"tie_word_embeddings is absent{default}"
        return f"{self.path} is {str(self.value).lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTie:
    """One tie, the flag that governs it, and what each version of transformers does under that flag."""

    tie: Tie
    flag: Flag
    asked: Mapping[str, bool]
    """By loader: whether it makes this tie under this config. A loader that does not know the class is absent."""
    paths: tuple[str, ...] = ()
    """Every key of the config that decides about this tie in some loader."""
    unconditional: frozenset[str] = frozenset()
    """The loaders that make this tie whatever the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSize:
    """A size that the config states, and the dotted key that states it."""

    path: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The ties that one checkpoint's class and config declare, by the names in its files.

    `inferred` is true when the class is unknown and the ties were read off names and shapes. `made` lists, by loader,
    the ties that it makes under this config, in its own order and from its own owners. `vocabulary` maps each
    stored tensor with a vocabulary axis to that axis; `expected_lengths` says, by loader, how long
    it makes that axis under this config. `levels` maps each key of the config that states the flag to its
    value; `not_boolean` has those values that are neither true nor false.
    """

    architecture: str | None
    family: str | None
    inferred: bool
    ties: tuple[DeclaredTie, ...]
    made: Mapping[str, tuple[Tie, ...]]
    flag: Flag
    embedding: str | None
    head: str | None
    vocabulary: Mapping[str, int]
    expected_lengths: Mapping[str, Mapping[str, int]]
    vocab_size: StatedSize | None
    hidden_size: StatedSize | None
    levels: Mapping[str, bool]
    not_boolean: Mapping[str, object]
    loaders: frozenset[str]
    """The versions of transformers that know the class."""
    prefixed: frozenset[str] = frozenset()
    """Stored names with the model's own prefix once more than the class's: transformers 5 removes it, others do not."""

    def find(self, target: str) -> DeclaredTie | None:
        """The tie with this target."""
        return next((declared for declared in self.ties if declared.tie.target == target), None)
