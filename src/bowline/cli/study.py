"""`bowline study --quick --out DIR`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bowline.cli.torch_requirement import needs_torch

if TYPE_CHECKING:
    from bowline.study.study_report import Answer

__all__ = ["study"]


def study(
    question: Annotated[
        list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Questions to answer; by default all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the report, the figures and the measurements.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A small study: minutes on two cores; the full one is estimated at a day on one."),
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the questions and exit.")] = False,
) -> None:
    """Answer questions about weight tying by measurement.

    Each answer has numbers, a figure and two sentences. The measurements are kept in the --out directory, so a stopped
    study continues where it was, and a finished one only writes its report again.
    """
    from bowline.errors import UsageError

    with needs_torch("study"):
        from bowline.study.experiment_sizes import FULL, QUICK
        from bowline.study.questions.question_list import QUESTIONS
        from bowline.study.study_run import study as answer_all
    if listed:
        width = max(map(len, QUESTIONS))
        for each in QUESTIONS.values():
            typer.echo(f"{each.name:<{width}}  {each.asks}")
        return
    if out is None:
        raise UsageError(
            "--out is missing: expected a directory for the report", help="bowline study --quick --out study"
        )
    looked_at = sys.stderr is not None and sys.stderr.isatty()
    total = 0.0

    def answered(answer: Answer) -> None:
        nonlocal total
        total += answer.elapsed
        typer.echo(f"{answer.name} ({answer.elapsed:.0f} s)\n  {answer.asks}\n  {answer.conclusion}\n")

    def tell(line: str) -> None:
        if looked_at:
            typer.echo(f"  ... {line}", err=True)

    try:
        answers = answer_all(question or (), out=out, setting=QUICK if quick else FULL, answered=answered, tell=tell)
    except KeyboardInterrupt:
        typer.echo(f"stopped; the measurements in {out} are kept: run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    typer.echo(
        f"answered {len(answers)} question{'s' * (len(answers) != 1)} in {total:.0f} s; the report: {out / 'study.md'}"
    )
