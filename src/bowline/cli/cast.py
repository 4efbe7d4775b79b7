"""`bowline cast SRC [DST] --dtype DTYPE`"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bowline.cli.edit_options import Copy, Destination, DryRun, InPlace, Source, run_edit

__all__ = ["cast"]


class Dtype(StrEnum):
    """A float dtype of a checkpoint."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


class Only(StrEnum):
    """A part of a checkpoint."""

    VOCABULARY = "vocabulary"


def cast(
    source: Source,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of every float tensor.")],
    destination: Destination = None,
    only: Annotated[Only | None, typer.Option(help="Only the tensors with a vocabulary axis.")] = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Store the float tensors in another dtype, rounded to nearest.

    The report counts numbers that became infinite, and those that are too small for the dtype.
    """
    run_edit(
        source,
        destination,
        in_place=in_place,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.cast(dtype.value, only=None if only is None else "vocabulary"),
    )
