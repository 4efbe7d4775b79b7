"""`bowline resize SRC [DST]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bowline.cli.edit_options import Copy, DestinationOrGGUF, DryRun, InPlace, SourceOrGGUF, run_edit

__all__ = ["resize"]


def resize(
    source: SourceOrGGUF,
    destination: DestinationOrGGUF = None,
    to: Annotated[int | None, typer.Option(help="The number of tokens.")] = None,
    pad_to_multiple_of: Annotated[int | None, typer.Option(help="Round the number of rows up to a multiple.")] = None,
    new_rows: Annotated[
        str,
        typer.Option(
            help="What a new token's row is: mean, gaussian (drawn by mean and covariance), zeros, "
            "copy:ID, or like:TEXT, the mean of TEXT's pieces; like: alone takes each added token's own text."
        ),
    ] = "mean",
    add_tokens: Annotated[
        Path | None, typer.Option(help="A file of texts, one a line, that become tokens of the tokenizer too.")
    ] = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Give every tensor of the vocabulary another number of rows, and the configs the size.

    The first ids stay. A token that the tokenizer or a config uses is never dropped: `bowline prune` does that.
    A GGUF file can only lose rows.
    """
    texts = []
    if add_tokens is not None:
        from bowline.edit.tokenizer import read_token_list

        texts = read_token_list(add_tokens)
    run_edit(
        source,
        destination,
        in_place=in_place,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.resize(to, pad_to_multiple_of=pad_to_multiple_of, new_rows=new_rows, add_tokens=texts),
    )
