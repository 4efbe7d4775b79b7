"""`bowline history DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bowline.wording import listed, printable

__all__ = ["history"]


def history(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's directory.")],
) -> None:
    """List the edits that were made in a directory, the oldest first."""
    from bowline.edit import history as recorded

    entries = recorded(directory)
    for entry in entries:
        state = (
            f"made from {entry.made_from}"
            if entry.made_from is not None
            else "the old files were removed"
            if entry.forgotten
            else f"changed {listed(list(entry.files), 3)}"
        )
        typer.echo(printable(f"{entry.when}  {entry.why}  ({state})"))
    if not entries:
        typer.echo(printable(f"{directory}: no edit is recorded"))
