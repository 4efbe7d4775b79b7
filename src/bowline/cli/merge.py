"""`bowline merge BASE ADAPTER DST`"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bowline.cli.edit_options import Copy, DryRun, run_edit

__all__ = ["merge"]


class Tied(StrEnum):
    """The ways to merge an adapter that trained the ends of a tie apart."""

    UNTIE = "untie"
    BOTH = "both"
    REFUSE = "refuse"


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base model's directory.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The directory of a PEFT adapter.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new directory for the result.")],
    tied: Annotated[
        Tied,
        typer.Option(
            help="Where the ends of a tie were trained apart: a matrix for each end, every change on the shared "
            "matrix, or an error."
        ),
    ] = Tied.UNTIE,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Merge a PEFT adapter into its base: each delta once, at the end of the tie where it was trained.

    LoRA, rsLoRA, DoRA, saved modules and trained rows are merged, in float32, a block of rows at a time. The flag is
    written as the bytes then are, and every tensor of the adapter is accounted for.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the blocks are small, and computed by threads of their own
    run_edit(
        base,
        destination,
        in_place=False,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.merge(adapter, tied=tied.value),
    )
