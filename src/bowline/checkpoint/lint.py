"""Faults in the files of a checkpoint that can still be read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Lint", "LintKind"]


class LintKind(StrEnum):
    """The kinds of lint. An audit rule for each says why it hurts and how to fix it."""

    TWO_MODELS = "two-models"
    INDEX_DISAGREES = "index-disagrees"
    NAME_IN_TWO_SHARDS = "name-in-two-shards"
    ORPHAN_SHARD = "orphan-shard"
    WRONG_TOTAL_SIZE = "wrong-total-size"
    PATH_LEAVES_DIRECTORY = "path-leaves-directory"
    SHARD_MISSING = "shard-missing"
    SHARD_MALFORMED = "shard-malformed"
    INDEX_MALFORMED = "index-malformed"
    INDEX_MISSING = "index-missing"
    MISALIGNED = "misaligned"
    ODD_NAME = "odd-name"
    NESTED_TENSORS = "nested-tensors"
    CONFIG_MALFORMED = "config-malformed"
    CONFIG_MISSING = "config-missing"
    CONFIG_OUTSIDE = "config-outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """One fault: `message` says what was seen in `files` and what was expected."""

    kind: LintKind
    message: str
    files: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
