"""The results of one run of `bowline audit`: its reports, and the places that could not be audited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bowline.auditing.audit_report import AuditReport
from bowline.auditing.rules import Finding
from bowline.wording import located

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_report import AdapterReport

__all__ = ["AuditFailure", "Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFailure:
    """A place that could not be audited, and why."""

    path: str
    message: str
    help: str | None

    @property
    def text(self) -> str:
        """The message, with the place in front unless it begins with it."""
        return located(self.message, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The reports and failures of one run: the input of every report format."""

    reports: tuple[AuditReport, ...]
    failures: tuple[AuditFailure, ...] = ()
    adapters: tuple[AdapterReport, ...] = ()
    verbose: bool = False
    """Whether the full report shows informational findings, not only their number."""

    @property
    def all_reports(self) -> tuple[AuditReport | AdapterReport, ...]:
        """The reports of checkpoints, then those of adapters."""
        return (*self.reports, *self.adapters)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all reports."""
        return tuple(finding for report in self.all_reports for finding in report.findings)

    @property
    def exit_code(self) -> int:
        """0 if nothing worse than information was found, 1 for findings, 2 if a place could not be audited."""
        if self.failures:
            return 2
        return 0 if all(report.clean for report in self.all_reports) else 1
