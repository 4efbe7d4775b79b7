"""What every command that edits a checkpoint has in common: its source and destination, and how its result is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bowline.cli.progress_bar import shown_progress
from bowline.errors import TieError, UsageError
from bowline.wording import printable

if TYPE_CHECKING:
    from bowline.edit import CheckpointEdit

__all__ = ["Copy", "Destination", "DestinationOrGGUF", "DryRun", "InPlace", "Source", "SourceOrGGUF", "run_edit"]

Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint's directory.")]
SourceOrGGUF = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint's directory, or a .gguf file.")]
Destination = Annotated[
    Path | None, typer.Argument(metavar="[DST]", help="A new directory for the result; or give --in-place.")
]
DestinationOrGGUF = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DST]",
        help="A new directory for the result, or a new .gguf file if SRC is GGUF; or give --in-place.",
    ),
]
InPlace = Annotated[
    bool,
    typer.Option("--in-place", help="Put the result in the place of SRC; `bowline undo` brings back the old files."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and write nothing.")]
Copy = Annotated[bool, typer.Option("--copy", help="Copy the files that do not change, instead of linking them.")]


def run_edit(
    source: str,
    destination: Path | None,
    *,
    in_place: bool,
    dry_run: bool,
    copy: bool,
    steps: Callable[[CheckpointEdit], CheckpointEdit],
) -> None:
    """Plan and commit an edit, and print its report. A refused edit exits with 1.

    Raises:
        BowlineError: the edit cannot be made.
    """
    from bowline.edit import open_checkpoint

    if (destination is None) is not in_place and not dry_run:
        raise UsageError(
            "expected a destination or --in-place, and not both",
            help="a destination gets the result and SRC stays; --in-place changes SRC, which `bowline undo` undoes",
        )
    try:
        with open_checkpoint(source) as checkpoint:
            edit = steps(checkpoint.edit())
            if dry_run:
                _show(edit.plan().lines())
                return
            with shown_progress(os.fspath(destination or source)) as progress:
                report = edit.commit(destination, in_place=in_place, copy=copy, progress=progress)
            _show(report.lines())
    except TieError as error:
        typer.echo(printable(f"error: {source}: {error}"), err=True)
        raise typer.Exit(1) from None


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(printable(line))
