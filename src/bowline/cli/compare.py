"""`bowline compare BEFORE AFTER`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bowline.cli.page_file import check_can_write
from bowline.cli.progress_bar import shown_progress

__all__ = ["compare"]


class ComparisonFormat(StrEnum):
    """The formats of a comparison."""

    FULL = "full"
    JSON = "json"


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A directory, a file, or org/name[@revision].")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The checkpoint to compare with it.")],
    output_format: Annotated[ComparisonFormat, typer.Option(help="Format of the report.")] = ComparisonFormat.FULL,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the comparison as one HTML page, with a search.")
    ] = None,
) -> None:
    """Compare embedding and head of two checkpoints: which rows moved, and by how much.

    Rows are paired by id, or by token where the tokenizers give a token different ids. The exit code is 0 if all rows
    are equal, and 1 if not.
    """
    import json

    from bowline.auditing.checkpoint_comparison import compare_open
    from bowline.auditing.report.comparison_text import render_comparison
    from bowline.checkpoint import open_checkpoint

    if html is not None:
        check_can_write(html)
    text = ""
    try:
        with open_checkpoint(before) as first, open_checkpoint(after) as second, shown_progress(after) as progress:
            report = compare_open(first, second, progress=progress)
            as_json = output_format is ComparisonFormat.JSON
            text = json.dumps(report.as_dict(), indent=2) if as_json else render_comparison(report)
            if html is not None:
                from bowline.checkpoint.durable.whole_file import write_whole
                from bowline.page import comparison_page

                write_whole(html, comparison_page(report, first, second, progress=progress))
    finally:
        if text:  # the report is not lost with the page
            typer.echo(text)
    raise typer.Exit(0 if report.equal else 1)
