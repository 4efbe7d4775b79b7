"""What is wrong with a checkpoint as a container, although it can still be read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Lint", "LintKind"]


class LintKind(StrEnum):
    """Each kind is one rule of the audit, which says why it hurts and how to mend it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """One observation: what was seen in `files`, what was expected."""

    kind: LintKind
    message: str
    files: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
