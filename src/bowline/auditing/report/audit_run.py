"""One run of the command: the reports, and the places that could not be audited."""

from __future__ import annotations

from dataclasses import dataclass

from bowline.auditing.audit_report import AuditReport
from bowline.auditing.rules import Finding
from bowline.checkpoint.locations import located

__all__ = ["AuditFailure", "Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFailure:
    """A place that could not be audited, and why."""

    path: str
    message: str
    help: str | None

    @property
    def told(self) -> str:
        """The message, with the place in it once."""
        return located(self.message, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a renderer is given."""

    reports: tuple[AuditReport, ...]
    failures: tuple[AuditFailure, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all reports."""
        return tuple(finding for report in self.reports for finding in report.findings)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings, 2 could not run."""
        if self.failures:
            return 2
        return 0 if all(report.clean for report in self.reports) else 1
