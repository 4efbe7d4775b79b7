"""The rules: one function per finding, each with a stable code and a page of its own (its docstring).

`BW1xx` compare the flag with the stored tensors, `BW2xx` check the rows of the vocabulary, `BW3xx` check the files of
the checkpoint, and `BW4xx` report what is unknown about the model and whether it looks untrained. `BW5xx` are about
PEFT adapters.
"""

from bowline.auditing.rules import (
    adapter_files,
    adapter_ties,
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
from bowline.auditing.rules.rule import Finding, Observation, Rule, Severity, all_rules

__all__ = [
    "Finding",
    "Observation",
    "Rule",
    "Severity",
    "adapter_files",
    "adapter_ties",
    "all_rules",
    "base_difference",
    "file_structure",
    "loading",
    "metadata",
    "quantised_table",
    "t5_scale",
    "tie_flag",
    "untrained",
    "vocabulary_rows",
]
