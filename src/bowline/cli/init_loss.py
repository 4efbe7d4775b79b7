"""`bowline init-loss --family t5`"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bowline.cli.option_errors import in_options
from bowline.cli.torch_requirement import needs_torch

if TYPE_CHECKING:
    from bowline.study.initial_loss import Comparison

__all__ = ["LossFormat", "init_loss"]


class LossFormat(StrEnum):
    """How the comparison is written."""

    FULL = "full"
    JSON = "json"


class FamilyName(StrEnum):
    """The model families that Bowline can build."""

    BERT = "bert"
    GPT2 = "gpt2"
    T5 = "t5"
    LSTM = "lstm"


@in_options({"draws=0": "--draws 0"}, renamed={"num_layers": "layers"})
def init_loss(
    family: Annotated[FamilyName, typer.Option(help="The model family.")],
    recipe: Annotated[
        list[str] | None, typer.Option(help="A recipe to compare; by default all of the family's. Repeatable.")
    ] = None,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Compare only tied or only untied models; by default both.")
    ] = None,
    vocab_size: Annotated[
        list[int] | None, typer.Option(help="Vocabulary size; by default the family's usual one. Repeatable.")
    ] = None,
    hidden_size: Annotated[
        list[int] | None, typer.Option(help="Hidden size; by default the family's usual one. Repeatable.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    draws: Annotated[int, typer.Option(help="Number of models to initialise and measure; 0 only predicts.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Also plot the result, to a .svg, .png or .pdf file.")] = None,
    output_format: Annotated[LossFormat, typer.Option(help="Format of the output.")] = LossFormat.FULL,
) -> None:
    """Predict and measure the loss before training.

    Compares the initialisation recipes of one model family, tied and untied.
    """
    with needs_torch("init-loss"):
        from bowline.study.initial_loss import compare
    if plot is not None:
        from bowline.plots.figure_style import check_can_save

        check_can_save(plot)
    ties = None if tied is None else [tied]
    rows: list[Comparison] = []
    for row in compare(
        family.value,
        recipe,
        ties=ties,
        vocab_sizes=vocab_size,
        hidden_sizes=hidden_size,
        num_layers=layers,
        draws=draws,
    ):
        if output_format is LossFormat.FULL:
            if not rows:
                typer.echo(HEADER)
            typer.echo(_line(row))
        rows.append(row)
    if output_format is LossFormat.JSON:
        typer.echo(json.dumps({"version": 1, "rows": [_as_dict(row) for row in rows]}, indent=2))
    else:
        typer.echo("\n" + "\n".join(_conclusions(rows)))
    if plot is not None:
        _draw(plot, rows)


def _draw(path: Path, rows: list[Comparison]) -> None:
    """Plot the prediction over vocabulary and hidden sizes, as lines, and the compared rows as points.

    Each line varies one size; the other is the largest that was asked for.
    """
    from bowline.plots.figure_style import save
    from bowline.plots.initial_loss_figure import Point, draw
    from bowline.study.initial_loss import compare

    family, layers = rows[0].family, rows[0].num_layers
    vocab, width = max(row.vocab_size for row in rows), max(row.hidden_size for row in rows)
    recipes = list({row.recipe.name: row.recipe for row in rows}.values())
    ties = sorted({row.tied for row in rows})

    def points(some: Iterable[Comparison]) -> list[Point]:
        return [
            Point(
                label=f"{row.recipe.name}, {'tied' if row.tied else 'untied'}",
                vocab_size=row.vocab_size,
                hidden_size=row.hidden_size,
                uniform=row.expected.uniform,
                predicted=row.expected.loss,
                measured=row.measured,
                error=row.error,
            )
            for row in some
        ]

    def line(vocab_sizes: list[int], hidden_sizes: list[int]) -> list[Point]:
        sizes = {"vocab_sizes": vocab_sizes, "hidden_sizes": hidden_sizes}
        return points(compare(family, recipes, ties=ties, num_layers=layers, draws=0, **sizes))

    over_vocab = sorted({2**power for power in range(9, 18, 2)} | {row.vocab_size for row in rows})
    over_width = sorted({2**power for power in range(6, 12)} | {row.hidden_size for row in rows})
    save(draw(family, line(over_vocab, [width]), line([vocab], over_width), points(rows)), path)


HEADER = (
    f"{'recipe':<28} {'head':<7} {'V':>7} {'d':>5} {'ln V':>7} {'predicted':>10} {'measured':>10} {'±':>6}  logit std"
)


def _line(row: Comparison) -> str:
    measured = f"{row.measured:10.3f}" if row.measured is not None else f"{'-':>10}"
    error = f"{row.error:6.3f}" if row.error is not None else f"{'-':>6}"
    return (
        f"{row.recipe.name:<28} {'tied' if row.tied else 'untied':<7} {row.vocab_size:7} {row.hidden_size:5} "
        f"{row.expected.uniform:7.3f} {row.expected.loss:10.3f} {measured} {error}  {row.expected.width:.3g}"
        + ("  (prediction and measurement disagree)" if row.agrees is False else "")
    )


def _conclusions(rows: list[Comparison]) -> list[str]:
    """One sentence for each recipe, tied and untied, at the largest size; it names the size if there are several."""
    several = len({(row.vocab_size, row.hidden_size) for row in rows}) > 1
    last = {(row.recipe.name, row.tied): row for row in sorted(rows, key=lambda row: (row.vocab_size, row.hidden_size))}
    return [
        f"{row.recipe.name}, {'tied' if row.tied else 'untied'}"
        + (f", V {row.vocab_size}, d {row.hidden_size}" if several else "")
        + f": {row.expected.conclusion}."
        for row in last.values()
    ]


def _as_dict(row: Comparison) -> dict[str, object]:
    return {
        "family": row.family,
        "recipe": row.recipe.name,
        "tied": row.tied,
        "vocab_size": row.vocab_size,
        "hidden_size": row.hidden_size,
        "num_layers": row.num_layers,
        "uniform": row.expected.uniform,
        "predicted": row.expected.loss,
        "spread": row.expected.spread,
        "logit_std": row.expected.width,
        "self_logit": row.expected.self_logit,
        "measured": row.measured,
        "standard_error": row.error,
        "conclusion": row.expected.conclusion,
    }
