"""`bowline tie SRC [DST]`"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bowline.cli.edit_options import Copy, DestinationOrGGUF, DryRun, InPlace, SourceOrGGUF, run_edit

__all__ = ["tie"]


class KeptEnd(StrEnum):
    """The end whose values serve both."""

    EMBEDDING = "embedding"
    HEAD = "head"


def tie(
    source: SourceOrGGUF,
    destination: DestinationOrGGUF = None,
    keep: Annotated[
        KeptEnd | None, typer.Option(help="The end whose values serve both, where the two differ. Never an average.")
    ] = None,
    keep_both: Annotated[bool, typer.Option("--keep-both", help="Store both ends, equal, and set the flag.")] = False,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Store one matrix for both ends: drop the redundant head, and set the flag.

    The two ends are compared byte by byte. Where they differ nothing is done, unless --keep says which one stays.
    Ties of biases, and of an encoder's and a decoder's embeddings, are treated alike.

    A GGUF file has no flag: output.weight is dropped where llama.cpp falls back to token_embd.weight.
    """
    run_edit(
        source,
        destination,
        in_place=in_place,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.tie(keep=None if keep is None else keep.value, keep_both=keep_both),
    )
