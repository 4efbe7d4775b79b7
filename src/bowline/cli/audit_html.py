"""`bowline audit --html FILE`: the report on one checkpoint as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bowline.cli.page_file import check_can_write
from bowline.cli.progress_bar import shown_progress
from bowline.errors import UsageError

if TYPE_CHECKING:  # each command starts without the audit
    from bowline.auditing import AuditReport

__all__ = ["check_can_write", "write_audit_page"]


def write_audit_page(reports: Sequence[AuditReport], file: Path, chosen: Sequence[str]) -> None:
    """Write the page about the audited checkpoint; `chosen` are the options that left rules out.

    Raises:
        UsageError: not exactly one checkpoint was audited, or the file cannot be written.
        CheckpointError: a table cannot be read.
    """
    if len(reports) != 1:
        raise UsageError(
            f"--html is a page about one checkpoint, and {len(reports)} were audited",
            help="audit one path that holds a checkpoint; `bowline audit --recursive` lists those below a directory",
        )
    from bowline.checkpoint import open_checkpoint
    from bowline.checkpoint.durable.whole_file import write_whole
    from bowline.page import audit_page

    place = reports[0].evidence.location
    with open_checkpoint(place) as checkpoint, shown_progress(place) as progress:
        write_whole(file, audit_page(reports[0], checkpoint, chosen=chosen, progress=progress))
