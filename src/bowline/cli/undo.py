"""`bowline undo DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bowline.wording import printable

__all__ = ["undo"]


def undo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's directory.")],
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Remove the old files that are kept, instead: nothing can be undone then."),
    ] = False,
) -> None:
    """Bring back the bytes before the last edit in place (or `audit --fix`)."""
    from bowline.edit import forget as forget_files
    from bowline.edit import undo as undo_last
    from bowline.edit.plan import size

    if forget:
        typer.echo(printable(f"{directory}: {size(forget_files(directory))} of old files removed"))
        return
    entry, notes = undo_last(directory)
    for note in notes:
        typer.echo(printable(note))
    typer.echo(printable(f"{directory}: undone: {entry.why}"))
