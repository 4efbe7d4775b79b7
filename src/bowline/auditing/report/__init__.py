"""Writes reports: `full` for people, `concise` for grep, `json` and `sarif` for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bowline.auditing.report.audit_run import AuditFailure, Run
from bowline.auditing.report.json_format import render_json
from bowline.auditing.report.sarif_format import render_sarif
from bowline.auditing.report.text_format import render_concise, render_full

__all__ = ["FORMATS", "AuditFailure", "Run", "render_full"]

FORMATS: Mapping[str, Callable[[Run], str]] = {
    "full": render_full,
    "concise": render_concise,
    "json": render_json,
    "sarif": render_sarif,
}
