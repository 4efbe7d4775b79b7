"""`bowline prune SRC DST`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bowline.cli.edit_options import Copy, DestinationOrGGUF, DryRun, InPlace, SourceOrGGUF, run_edit

__all__ = ["PruneCommand", "prune"]

CORPUS = "--corpus"


class PruneCommand(TyperCommand):
    """`--corpus A B C` stands for `--corpus A --corpus B --corpus C`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        in_corpus, files = False, 0
        for argument in args:
            if argument == CORPUS:
                in_corpus, files = True, 0
            elif in_corpus and not argument.startswith("-"):
                spread += [CORPUS, argument]
                files += 1
            else:
                spread += [CORPUS] if in_corpus and not files else []  # typer says that its value is missing
                in_corpus = False
                spread.append(argument)
        spread += [CORPUS] if in_corpus and not files else []
        return super().parse_args(ctx, spread)


def prune(
    source: SourceOrGGUF,
    destination: DestinationOrGGUF = None,
    corpus: Annotated[
        list[Path], typer.Option(help="Text files, in UTF-8, whose tokens stay: several, after SRC and DST.")
    ] = [],  # noqa: B006
    keep_tokens: Annotated[
        Path | None, typer.Option(help="A file of tokens that stay, one a line, as in the vocabulary, or by id.")
    ] = None,
    keep_scripts: Annotated[
        str | None,
        typer.Option(
            "--keep-scripts",
            "--keep-languages",
            help="A regular expression: tokens stay in whose text it is found, such as [\u0370-\u03ff] for Greek.",
        ),
    ] = None,
    draft: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Make a head of K rows for speculative decoding instead: those of the corpus' most frequent tokens.",
        ),
    ] = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Keep only the tokens that a text uses: rows, tokenizer, configs, and a map from old ids to new.

    Text of the corpus splits as before; any other text is still spelled, in more tokens. Special and added tokens,
    bytes or single characters, and every token that another is merged from stay.

    In a GGUF file the rows that stay are the stored bytes; --corpus needs the model's tokenizer.json beside it.

    With --draft, DST gets lm_head.weight, and the maps d2t and t2d between its rows and the target's ids, as SGLang and
    vLLM read them; a draft model in EAGLE's layout stays whole, with the smaller head.
    """
    run_edit(
        source,
        destination,
        in_place=in_place,
        dry_run=dry_run,
        copy=copy,
        steps=lambda edit: edit.prune(corpus=corpus, keep_tokens=keep_tokens, pattern=keep_scripts, draft=draft),
    )
