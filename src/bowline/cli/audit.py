"""`bowline audit PATH...`"""

from __future__ import annotations

from typing import Annotated

import typer

from bowline.audit.fix import fix_config
from bowline.audit.render import FORMATS, Failure, Run
from bowline.audit.render.printable import printable
from bowline.audit.report import AuditReport
from bowline.cli.bar import shown_progress
from bowline.cli.formats import OutputFormat
from bowline.errors import BowlineError, ConfigError

__all__ = ["audit"]


def audit(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Directories, files, or Hub repositories as org/name[@revision]."),
    ],
    output_format: Annotated[OutputFormat, typer.Option(help="How to report.")] = OutputFormat.FULL,
    select: Annotated[list[str], typer.Option(help="Only codes that begin so; may be repeated.")] = [],  # noqa: B006
    ignore: Annotated[list[str], typer.Option(help="No codes that begin so; may be repeated.")] = [],  # noqa: B006
    values: Annotated[
        bool, typer.Option("--values/--headers-only", help="Read the vocabulary's rows, or headers alone.")
    ] = True,
    fix: Annotated[
        bool, typer.Option("--fix", help="Make config.json say what the bytes hold, at every level.")
    ] = False,
) -> None:
    """Say whether input embedding and output head are tied, and what each loader will make of it."""
    from bowline.audit.report import select_rules

    select_rules(split_codes(select), split_codes(ignore))  # a wrong code is said before any reading
    reports: list[AuditReport] = []
    failures: list[Failure] = []
    for path in paths:
        try:
            reports.append(_audit_one(path, split_codes(select), split_codes(ignore), values=values, fix=fix))
        except BowlineError as error:
            failures.append(Failure(path=path, message=error.message, help=error.help))
    run = Run(reports=tuple(reports), failures=tuple(failures))
    typer.echo(FORMATS[output_format.value](run))
    raise typer.Exit(run.exit_code)


def split_codes(options: list[str]) -> list[str]:
    """`--select BW1,BW203` is two codes."""
    return [code.strip() for option in options for code in option.split(",") if code.strip()]


def _audit_one(path: str, select: list[str], ignore: list[str], *, values: bool, fix: bool) -> AuditReport:
    from bowline.audit import audit as audit_checkpoint

    with shown_progress(path) as progress:
        report = audit_checkpoint(path, values=values, select=select, ignore=ignore, progress=progress)
    if fix:
        try:
            changed = fix_config(report)
        except ConfigError as error:  # a refused edit: its findings stand, and are told
            typer.echo(printable(f"error: {error}"), err=True)
            return report
        if changed:
            for line in changed:
                typer.echo(printable(f"{path}: {line}"), err=True)
            report = audit_checkpoint(path, values=values, select=select, ignore=ignore)
    return report
