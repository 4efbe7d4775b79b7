"""The rules: one function per finding, each with a stable code and a page of its own (its docstring).

`BW1xx` compare the flag with the bytes, `BW2xx` look at the vocabulary's rows, `BW3xx` at the container, `BW4xx` at
what was known of the model at all, and of how it was drawn.
"""

from bowline.audit.rules import container, flag, initial, knowledge, t5, vocabulary
from bowline.audit.rules.rule import Finding, Observation, Rule, Severity, all_rules

__all__ = [
    "Finding",
    "Observation",
    "Rule",
    "Severity",
    "all_rules",
    "container",
    "flag",
    "initial",
    "knowledge",
    "t5",
    "vocabulary",
]
