"""`bowline train --family gpt2 --data stdlib --out DIR`"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from bowline.cli.field_options import with_field_options
from bowline.cli.option_errors import in_options
from bowline.cli.torch_requirement import needs_torch
from bowline.wording import printable

if TYPE_CHECKING:
    from bowline.train.training_run import Plan, TrainedRun

__all__ = ["TrainCommand", "train"]


STOPPED = "stopped; --resume continues from the last checkpoint, if there is one"
TRY = {
    "gpt2": 'bowline generate {} "def "',
    "lstm": 'bowline generate {} "def "',
    "bert": 'bowline fill-mask {} "def [MASK](self):"',
    "t5": 'bowline generate {} "for <extra_id_0> in range(10):"',
}


class TrainCommand(TyperCommand):
    """Builds the command when it is used: its options are the fields of `TrainConfig`, whose import loads torch."""

    @property
    def params(self) -> list[Any]:
        options: list[Any] = _command().params
        return options

    @params.setter
    def params(self, own: list[Any]) -> None:
        """Ignores the options of the placeholder, which has none."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        return _command().make_context(*arguments, **extra)


def train() -> None:
    """Train a tokenizer and a model on plain text.

    Saves checkpoints on the way, and at the end a model directory with config, weights and tokenizer.
    """


@functools.cache
def _command() -> Any:
    with needs_torch("train"):
        from bowline.train.train_config import TrainConfig
    verb = in_options({"tie=false": "--untie"})(with_field_options(_train, TrainConfig))
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("train", help=train.__doc__)(verb)
    return get_command(app)


def _train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new directory for the model.")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON file with any of these options; the command line takes precedence."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in DIR, or start one if there is none.")
    ] = False,
    **options: Any,
) -> None:
    from bowline.train.loop.run_log import shown
    from bowline.train.parallel.processes import end_process, is_first
    from bowline.train.train_config import TrainConfig
    from bowline.train.training_run import train as run

    given = {name: value for name, value in options.items() if value is not None and value != []}
    stated = TrainConfig.read(config) if config is not None else {}
    wanted = TrainConfig.from_dict({**stated, **given}, str(config) if config is not None else "the options")

    def on_plan(plan: Plan) -> None:
        typer.echo(printable_lines(plan.lines))

    try:
        with shown(wanted.value("steps")) as progress:
            outcome = run(
                wanted,
                out,
                resume=resume,
                say=lambda line: typer.echo(line, err=True),
                on_plan=on_plan,
                log=lambda record: progress.record({key: record[key] for key in record if key != "groups"}),
                on_step=progress.step,
            )
    except KeyboardInterrupt as stopped:
        if is_first():
            typer.echo(printable(str(stopped) or STOPPED), err=True)
        raise typer.Exit(130) from None
    if is_first():
        typer.echo("\n".join(_end(wanted.family, outcome)))
    end_process()


def printable_lines(lines: list[str]) -> str:
    """The lines with control characters escaped, since names of files may contain them."""
    return "\n".join(printable(line) for line in lines)


def _end(family: str, outcome: TrainedRun) -> list[str]:
    """The last lines: where the model is, how good it is, and what to try."""
    place = printable(json.dumps(str(outcome.directory)) if " " in str(outcome.directory) else str(outcome.directory))
    loss = outcome.result.held_out_loss
    of = {"bert": " of masked tokens", "t5": " of masked spans"}.get(family, "")
    seen = f"held-out perplexity{of} {outcome.perplexity:.4g} (loss {loss:.4f})" if loss is not None else "trained"
    return [
        f"{seen} after {outcome.result.step:,} step{'s' * (outcome.result.step != 1)}; the model is in {place}",
        f"try: {TRY[family].format(place)}",
        f"     bowline audit {place}",
    ]
