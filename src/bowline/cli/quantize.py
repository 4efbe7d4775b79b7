"""`bowline quantize SRC [DST] --dtype DTYPE`"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from bowline.cli.edit_options import Copy, Destination, DryRun, InPlace, Source, run_edit

__all__ = ["quantize"]


class Codes(StrEnum):
    """The width of the codes."""

    INT8 = "int8"
    INT4 = "int4"


def quantize(
    source: Source,
    dtype: Annotated[Codes, typer.Option(help="The width of the codes.")],
    destination: Destination = None,
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Columns that share a scale. Default: a row for int8, 32 for int4."),
    ] = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Quantise the tied matrix once, for both ends. An untied model is refused.

    int8 is stored as torchao's Int8Tensor, which transformers loads as one table for both ends if torchao is installed.
    int4 is stored as quantize_tied stores it, and transformers refuses it. bowline.load_checkpoint reads both.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the blocks are small, and computed by threads of their own
    run_edit(
        source,
        destination,
        in_place=in_place,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.quantize(dtype.value, group_size=group_size),
    )
