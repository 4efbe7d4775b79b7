"""The SARIF 2.1.0 report (OASIS, 2020), which code hosts show beside the file."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bowline import __version__
from bowline.auditing.audit_report import AuditReport
from bowline.auditing.report.audit_run import Run
from bowline.auditing.rules import Finding, Rule, Severity, all_rules

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_report import AdapterReport

__all__ = ["render_sarif"]

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render_sarif(run: Run) -> str:
    """The run as SARIF: all rules, each finding as a result, each failure as a notification."""
    rules = all_rules()
    positions = {rule.code: at for at, rule in enumerate(rules)}
    record = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "bowline",
                        "version": __version__,
                        "rules": [
                            {
                                "id": rule.code,
                                "name": rule.name,
                                "shortDescription": {"text": rule.summary},
                                "fullDescription": {"text": _what(rule)},
                                "help": {"text": rule.page},
                                "defaultConfiguration": {"level": LEVELS[rule.severity]},
                            }
                            for rule in rules
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": not run.failures,
                        "toolExecutionNotifications": [
                            {"level": "error", "message": {"text": _with_help(failure.text, failure.help)}}
                            for failure in run.failures
                        ],
                    }
                ],
                "results": [
                    _result(report, finding, positions[finding.code])
                    for report in run.all_reports
                    for finding in report.findings
                ],
            }
        ],
    }
    return json.dumps(record, indent=2, ensure_ascii=True)


def _result(report: AuditReport | AdapterReport, finding: Finding, position: int) -> dict[str, Any]:
    return {
        "ruleId": finding.code,
        "ruleIndex": position,
        "level": LEVELS[finding.severity],
        "message": {"text": _with_help(finding.message, finding.help)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(report.evidence.location, finding.file)},
                    "region": {"startLine": 1},  # GitHub asks for a line, and most of these files have none
                },
                "logicalLocations": [{"name": name, "kind": "member"} for name in finding.tensors],
            }
        ],
    }


def _with_help(message: str, help: str | None) -> str:
    """The text of a message. `[a](b)` is a link in SARIF (3.11.6), and a name from a checkpoint must not be one."""
    text = f"{message} (help: {help})" if help else message
    return text.replace("](", "\\](")


def _what(rule: Rule) -> str:
    """The part of the rule's page that says what it finds."""
    return " ".join(rule.page.partition("What: ")[2].partition("\n\n")[0].split()) or rule.summary


def _uri(location: str, file: str | None) -> str:
    """The address of the file: relative below the working directory, which on a code host is the repository."""
    path = Path(location)
    if file is not None and path.name != file:
        path = (path.parent if path.is_file() else path) / file
    if path.is_absolute():
        with suppress(ValueError):
            path = path.relative_to(Path.cwd())
    address = quote(os.fsencode(path.as_posix()))
    return f"file://{address}" if path.is_absolute() else address
