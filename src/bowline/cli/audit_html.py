"""`bowline audit --html FILE`: the report on one checkpoint as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bowline.cli.page_file import check_can_write
from bowline.cli.progress_bar import shown_progress
from bowline.errors import UsageError
from bowline.wording import listed

if TYPE_CHECKING:  # each command starts without the audit
    from bowline.auditing import AdapterReport, AuditReport

__all__ = ["check_page", "write_audit_page"]


def check_page(file: Path, paths: Sequence[str]) -> Sequence[str]:
    """Before the audit: whether a page about what is at these paths can be written; returns the paths.

    Raises:
        UsageError: there is not exactly one path, or the file cannot be written.
    """
    check_can_write(file)
    if len(paths) != 1:
        named = f": {listed(paths, 4)}" if paths else ""
        raise UsageError(f"--html is for one checkpoint, not for {len(paths)}{named}", help="give the path of one")
    return paths


def write_audit_page(report: AuditReport | AdapterReport, file: Path, chosen: Sequence[str]) -> None:
    """Write the page about the audited checkpoint; `chosen` are the options that left rules out.

    Raises:
        UsageError: the report is about an adapter, or the file cannot be written.
        CheckpointError: a table cannot be read.
    """
    from bowline.auditing.audit_report import AuditReport
    from bowline.checkpoint import open_checkpoint
    from bowline.checkpoint.durable.whole_file import write_whole
    from bowline.page import audit_page

    if not isinstance(report, AuditReport):
        raise UsageError(
            f"{report.evidence.location}: --html is for a checkpoint, and this is an adapter",
            help="leave out --html, or give the checkpoint that `bowline merge` made of it",
        )
    place = report.evidence.location
    with open_checkpoint(place) as checkpoint, shown_progress(place) as progress:
        write_whole(file, audit_page(report, checkpoint, chosen=chosen, progress=progress))
