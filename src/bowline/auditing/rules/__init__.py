"""The rules: one function per finding, each with a stable code and a page of its own (its docstring).

`BW1xx` compare the flag with the stored tensors, `BW2xx` check the rows of the vocabulary, `BW3xx` check the files of
the checkpoint, and `BW4xx` report what is unknown about the model and whether it looks untrained. `BW5xx` are about
PEFT adapters, and are loaded when they are needed.
"""

from __future__ import annotations

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules import (
    base_difference,
    file_structure,
    loading,
    metadata,
    quantised_table,
    t5_scale,
    tie_flag,
    untrained,
    vocabulary_rows,
)
from bowline.auditing.rules.rule import Finding, Observation, Rule, Severity, registered_rules

__all__ = [
    "Finding",
    "Observation",
    "Rule",
    "Severity",
    "all_rules",
    "base_difference",
    "checkpoint_rules",
    "file_structure",
    "loading",
    "metadata",
    "quantised_table",
    "t5_scale",
    "tie_flag",
    "untrained",
    "vocabulary_rows",
]


def all_rules() -> tuple[Rule, ...]:
    """All rules, sorted by code."""
    from bowline.auditing.rules import adapter_files, adapter_ties  # noqa: F401 - they register the rules

    return registered_rules()


def checkpoint_rules() -> tuple[Rule, ...]:
    """The rules about checkpoints, sorted by code."""
    return tuple(rule for rule in registered_rules() if rule.subject is Evidence)
