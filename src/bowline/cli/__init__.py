"""The command line: one file per command. Exit codes: 0 clean, 1 findings or a refused edit, 2 could not run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper

import typer

from bowline import __version__
from bowline.cli.audit import audit
from bowline.cli.cast import cast
from bowline.cli.compare import compare
from bowline.cli.dedupe import dedupe
from bowline.cli.demo import demo
from bowline.cli.doctor import doctor
from bowline.cli.explain import explain
from bowline.cli.export import export
from bowline.cli.extract import extract
from bowline.cli.fill_mask import fill_mask
from bowline.cli.generate import generate
from bowline.cli.history import history
from bowline.cli.init_loss import init_loss
from bowline.cli.merge import merge
from bowline.cli.prune import PruneCommand, prune
from bowline.cli.quantize import quantize
from bowline.cli.resize import resize
from bowline.cli.study import study
from bowline.cli.tie import tie
from bowline.cli.train import TrainCommand, train
from bowline.cli.undo import undo
from bowline.cli.untie import untie
from bowline.errors import BowlineError
from bowline.wording import printable

__all__ = ["app", "main"]

app = typer.Typer(
    name="bowline",
    help=(
        "Weight tying in language models: audit whether code, config, checkpoint and loaders agree on it, "
        "edit checkpoints on disk, and train and run tied models."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(audit)
app.command()(explain)
app.command()(compare)
app.command()(tie)
app.command()(untie)
app.command()(resize)
app.command(cls=PruneCommand)(prune)
app.command()(merge)
app.command()(extract)
app.command()(export)
app.command()(cast)
app.command()(quantize)
app.command()(dedupe)
app.command()(undo)
app.command()(history)
app.command()(generate)
app.command()(fill_mask)
app.command()(init_loss)
app.command(cls=TrainCommand)(train)
app.command()(study)
app.command()(demo)
app.command()(doctor)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Weight tying in language models."""
    if show:
        from bowline.auditing.loaders import loaders_run

        typer.echo(f"bowline {__version__}")
        typer.echo(f"tables of {', '.join(dict.fromkeys(loaders_run().values()))}")
        raise typer.Exit


def main() -> None:
    """The entry point: a Bowline error becomes one line on stderr and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal cannot encode are escaped
    stdout = sys.stdout
    try:
        app()
    except SystemExit:
        if sys.stdout is not stdout:  # typer replaces stdout when the reader of a pipe has closed it
            sys.exit(141)
        raise
    except KeyboardInterrupt as stop:
        typer.echo(printable(str(stop) or "interrupted"), err=True)
        sys.exit(130)
    except BowlineError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        sys.exit(2)
    except OSError as error:  # reading a checkpoint raises a BowlineError, so this is about stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter writes again when it exits
        with suppress(OSError):
            line = f"error: the output cannot be written: {error.strerror or error} (help: check where it is sent)"
            typer.echo(printable(line), err=True)
        sys.exit(2)
