"""`bowline extract BASE TUNED DST --rank R`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bowline.errors import TieError
from bowline.wording import printable

__all__ = ["extract"]


class WhichEnd(StrEnum):
    """An end of the vocabulary."""

    HEAD = "head"
    EMBEDDING = "embedding"


def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base model's directory.")],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The tuned model's directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new directory for the adapter.")],
    rank: Annotated[int, typer.Option(help="The rank of the adapter.")],
    end: Annotated[WhichEnd, typer.Option(help="The end of the vocabulary that is compared.")] = WhichEnd.HEAD,
) -> None:
    """Write the difference of two models' heads as a PEFT LoRA: the best one of its rank.

    The report says how much of the difference it holds, and which other tensors differ.
    """
    from bowline.edit.adapter.extraction import extract_adapter

    try:
        report = extract_adapter(base, tuned, destination, rank=rank, end=end.value)
    except TieError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(1) from None
    for line in report.lines():
        typer.echo(printable(line))
