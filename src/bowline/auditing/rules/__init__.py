"""The rules: one function per finding, each with a stable code and a page of its own (its docstring).

`BW1xx` compare the flag with the bytes, `BW2xx` look at the vocabulary's rows, `BW3xx` at the container, `BW4xx` at
what was known of the model at all, and of how it was drawn.
"""

from bowline.auditing.rules import container, metadata, t5_scale, tie_flag, untrained, vocabulary_rows
from bowline.auditing.rules.rule import Finding, Observation, Rule, Severity, all_rules

__all__ = [
    "Finding",
    "Observation",
    "Rule",
    "Severity",
    "all_rules",
    "container",
    "metadata",
    "t5_scale",
    "tie_flag",
    "untrained",
    "vocabulary_rows",
]
