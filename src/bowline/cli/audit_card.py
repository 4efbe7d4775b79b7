"""`bowline audit --card`: a passage of Markdown for one checkpoint's model card."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from bowline.cli.progress_bar import shown_progress
from bowline.errors import UsageError
from bowline.wording import listed

__all__ = ["print_card"]


def print_card(paths: Sequence[str], *, values: bool, base: str | None) -> int:
    """Audit the only path and print its card; returns the exit code of the audit.

    Raises:
        UsageError: there is not exactly one path, or it holds an adapter.
        CheckpointError: the checkpoint cannot be read.
    """
    if len(paths) != 1:
        named = f": {listed(paths, 4)}" if paths else ""
        raise UsageError(f"--card is for one checkpoint, not for {len(paths)}{named}", help="give the path of one")
    from bowline.auditing.audit_report import AuditReport
    from bowline.auditing.place_audit import audit_place
    from bowline.auditing.report.audit_run import Run
    from bowline.auditing.report.card import render_card

    with shown_progress(paths[0]) as progress:
        report = audit_place(paths[0], values=values, base=base, progress=progress)
    if not isinstance(report, AuditReport):
        raise UsageError(
            f"{paths[0]}: --card is for a checkpoint, and this is an adapter",
            help="leave out --card, or give the checkpoint that `bowline merge` made of it",
        )
    typer.echo(render_card(report))
    return Run(reports=(report,)).exit_code
