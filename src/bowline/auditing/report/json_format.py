"""The JSON report, with a version number; its schema is `docs/audit.schema.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bowline.auditing.audit_report import REPORT_VERSION
from bowline.auditing.loaders import loaders_run
from bowline.auditing.report.audit_run import Run

__all__ = ["record_of", "render_json", "render_line"]


def render_json(run: Run) -> str:
    """The run as one JSON object with a `version`. JSON lacks NaN and infinities; they become null."""
    return json.dumps(record_of(run), indent=2, ensure_ascii=True, allow_nan=False)


def render_line(path: str, record: Mapping[str, Any]) -> str:
    """The record of one place as a line of results, which begins with its `path`."""
    return json.dumps({"path": path, **record}, ensure_ascii=True, allow_nan=False)


def record_of(run: Run) -> dict[str, Any]:
    """The run as JSON holds it."""
    record = {
        "version": REPORT_VERSION,
        "loaders": loaders_run(),
        "checkpoints": [report.as_dict() for report in run.reports],
        "adapters": [report.as_dict() for report in run.adapters],
        "failures": [
            {"path": failure.path, "message": failure.message, "help": failure.help} for failure in run.failures
        ],
    }
    found: dict[str, Any] = _finite(record)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value
