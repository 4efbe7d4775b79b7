"""`bowline demo`: a real checkpoint, healthy ones as transformers writes them, and each broken as people report it.

`layouts` are the healthy ones, `faults` break them, `show` audits them all and holds what was found against what was
expected: the demo is its own check. It runs on the base install, without torch and without transformers.
"""

from __future__ import annotations

from bowline.demo.audit_demo import Show
from bowline.demo.faults import CASES, Case
from bowline.demo.layouts import Layout

__all__ = ["CASES", "Case", "Layout", "Show"]
