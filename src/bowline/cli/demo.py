"""`bowline demo`"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from bowline.errors import UsageError, how_to_install

__all__ = ["demo"]


def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the checkpoints into DIR (new or empty) and keep them.")
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="Build each model family tied and untied instead. Needs torch.")
    ] = False,
) -> None:
    """Audit healthy and broken example checkpoints.

    One is a real, trained checkpoint; the broken ones reproduce faults that people have reported. The exit code is 1
    if a result is not as expected.
    """
    if models:
        try:
            from bowline.demo.family_demo import FamilyShow
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UsageError("--models needs torch, which is not installed", help=how_to_install("torch")) from None
        families = FamilyShow()
        families.run()
        raise typer.Exit(1 if families.problems else 0)
    from bowline.demo.audit_demo import Show

    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise UsageError(f"{keep}: expected a new or empty directory", help="give another directory")
    place = nullcontext(str(keep)) if keep is not None else tempfile.TemporaryDirectory(prefix="bowline-demo-")
    with place as directory:
        show = Show(Path(directory))
        show.run()
    if keep is not None:
        typer.echo(f"The checkpoints are in {keep}; try: bowline audit --fix {keep / 'gpt2-flag-flipped'}")
    raise typer.Exit(1 if show.problems else 0)
