"""`bowline demo`: audits a real checkpoint, healthy ones as transformers writes them, and broken ones.

`layouts` writes the healthy checkpoints, `faults` breaks them in ways that people have reported, and `audit_demo`
audits them all and compares the findings with the expected ones, so that the demo checks itself. It runs on the base
install, without torch and without transformers.
"""

from __future__ import annotations

from bowline.demo.audit_demo import Show
from bowline.demo.faults import CASES, Case
from bowline.demo.layouts import Layout

__all__ = ["CASES", "Case", "Layout", "Show"]
