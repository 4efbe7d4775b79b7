"""The command line: one file per verb. Exit codes: 0 clean, 1 findings or a refused edit, 2 could not run."""

from __future__ import annotations

import sys

import typer

from bowline import __version__
from bowline.audit.render.printable import printable
from bowline.cli.audit import audit
from bowline.cli.demo import demo
from bowline.cli.explain import explain
from bowline.errors import BowlineError

__all__ = ["app", "main"]

app = typer.Typer(
    name="bowline",
    help="Weight tying in language models: what the class declares, the config says, the bytes hold, and loaders do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(audit)
app.command()(explain)
app.command()(demo)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Weight tying in language models."""
    if show:
        typer.echo(f"bowline {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: an error of ours is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except BowlineError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        sys.exit(141)
