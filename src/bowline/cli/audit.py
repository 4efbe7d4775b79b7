"""`bowline audit PATH...`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bowline.cli.audit_card import print_card
from bowline.cli.audit_html import check_page, write_audit_page
from bowline.cli.audit_many import audit_many
from bowline.cli.changed_files import checkpoints_of
from bowline.cli.output_format import OutputFormat
from bowline.cli.progress_bar import shown_progress
from bowline.errors import BowlineError, ConfigError, UsageError
from bowline.wording import printable

if TYPE_CHECKING:  # each command starts without the audit
    from bowline.auditing import AdapterReport, AuditReport

__all__ = ["audit"]


def audit(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH...", help="Directories, files, or Hub repositories as org/name[@revision]."),
    ] = None,
    output_format: Annotated[OutputFormat, typer.Option(help="Format of the report.")] = OutputFormat.FULL,
    select: Annotated[list[str], typer.Option(help="Report only codes that begin with this. Repeatable.")] = [],  # noqa: B006
    ignore: Annotated[list[str], typer.Option(help="Leave out codes that begin with this. Repeatable.")] = [],  # noqa: B006
    values: Annotated[
        bool,
        typer.Option("--values/--headers-only", help="Read the rows of the vocabulary tables, or only file headers."),
    ] = True,
    recursive: Annotated[
        bool, typer.Option("--recursive", help="Audit each checkpoint directory in PATH and below it.")
    ] = False,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="PATH... are files that changed: audit the checkpoint of each, if it has one."),
    ] = False,
    from_file: Annotated[
        Path | None, typer.Option(metavar="LIST", help="Also audit the paths in a file, one a line.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="jsonl: audits at once, each in a process of its own.")] = 1,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="jsonl: seconds after which one audit is stopped.")
    ] = 600.0,
    output_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="jsonl: add the lines to FILE, without the paths that it has already."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Compare the rows of embedding and head with the original checkpoint, a PATH as above. If PATH is an "
            "adapter: its base model."
        ),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Set the flag in config.json to agree with the stored tensors, at every level."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show informational findings in the full report, not only their number.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot how far E Eᵀ is from I, to a .svg, .png or .pdf file.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the report as one HTML page, with plots and a search of tokens."),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Print a passage in Markdown for the checkpoint's model card instead.")
    ] = False,
) -> None:
    """Check whether a checkpoint's embedding and head are tied.

    Reports what the config says, what the files hold, and what each loader will do. For a PEFT adapter: which end it
    trains, and what a merge makes of the tie.
    """
    from bowline.auditing.audit_report import AuditReport, select_rules
    from bowline.auditing.queue.place_list import expanded
    from bowline.auditing.report import FORMATS, AuditFailure, Run

    # report a wrong code before any file is read
    select_rules(split_codes(select), split_codes(ignore), adapters=False)
    places = _places(paths or [], from_file)
    if changed:
        if recursive:
            raise UsageError("--changed with --recursive: each finds the checkpoints", help="leave out one of the two")
        places = checkpoints_of(places)
    if card:
        for name, given in (
            (f"--output-format {output_format}", output_format != OutputFormat.FULL),
            ("--select", bool(select)),
            ("--ignore", bool(ignore)),
            ("--verbose", verbose),
            ("--fix", fix),
            ("--plot", plot is not None),
            ("--html", html is not None),
            ("--jobs", jobs != 1),
            ("--output-file", output_file is not None),
        ):
            if given:
                raise UsageError(
                    f"{name} with --card: a card is Markdown about every finding of one checkpoint",
                    help=f"leave out --card or {name.partition(' ')[0]}",
                )
        raise typer.Exit(print_card(list(expanded(places, recursive=recursive)), values=values, base=base))
    if output_format == OutputFormat.JSONL:
        for name, given in (("--fix", fix), ("--plot", plot is not None), ("--html", html is not None)):
            if given:
                raise UsageError(
                    f"{name} with --output-format jsonl: audits run in other processes, which only read",
                    help=f"leave out {name}, or audit one checkpoint in another format",
                )
        options = {"values": values, "base": base, "select": split_codes(select), "ignore": split_codes(ignore)}
        each = expanded(places, recursive=recursive)
        raise typer.Exit(audit_many(each, options, jobs=jobs, time_limit=time_limit, output_file=output_file))
    for name, given in (("--jobs", jobs != 1), ("--output-file", output_file is not None)):
        if given:
            raise UsageError(f"{name}: is for --output-format jsonl", help="add --output-format jsonl")
    if plot is not None:
        from bowline.plots.figure_style import check_can_save

        check_can_save(plot)
    each = expanded(places, recursive=recursive)
    if html is not None:
        each = iter(check_page(html, list(each)))
    reports: list[AuditReport] = []
    adapters: list[AdapterReport] = []
    failures: list[AuditFailure] = []
    for path in each:
        try:
            found = _audit_one(path, split_codes(select), split_codes(ignore), values=values, base=base, fix=fix)
            if isinstance(found, AuditReport):
                reports.append(found)
            else:
                adapters.append(found)
        except BowlineError as error:
            failures.append(AuditFailure(path=path, message=error.message, help=error.help))
    if plot is not None:
        _draw(reports, plot)
    run = Run(
        reports=tuple(reports),
        adapters=tuple(adapters),
        failures=tuple(failures),
        verbose=verbose or bool(select),
    )
    text = FORMATS[output_format.value](run)
    try:
        _write_page([*reports, *adapters], html, select, ignore)
    finally:  # the report is not lost with the page
        typer.echo(text)
    raise typer.Exit(run.exit_code)


def _places(paths: list[str], from_file: Path | None) -> list[str]:
    if from_file is None:
        if not paths:
            raise typer.BadParameter("missing; give a directory, a file, or --from-file LIST", param_hint="PATH...")
        return paths
    from bowline.auditing.queue.place_list import read_places

    return [*paths, *read_places(from_file)]


def _draw(reports: list[AuditReport], path: Path) -> None:
    """Plot the embedding of the audited checkpoint.

    Raises:
        UsageError: not exactly one checkpoint was audited, its table was not read, or matplotlib is missing.
    """
    from bowline.auditing.vocabulary_tables import sampled_table
    from bowline.checkpoint import open_checkpoint
    from bowline.plots.figure_style import save
    from bowline.plots.identity_figure import identity_figure

    name = reports[0].evidence.declaration.embedding if len(reports) == 1 else None
    if name is None or reports[0].evidence.geometry is None:
        raise UsageError(
            "--plot needs exactly one checkpoint whose embedding was read",
            help="audit one path, without --headers-only",
        )
    with open_checkpoint(reports[0].evidence.location) as checkpoint:
        tensor = checkpoint.tensors[name]
        table = sampled_table(checkpoint, tensor)
    save(identity_figure(table, rows=tensor.shape[0], name=name), path)


def _write_page(
    found: Sequence[AuditReport | AdapterReport], file: Path | None, select: list[str], ignore: list[str]
) -> None:
    """Write the page of the only report, if one is wanted; an audit that failed has none."""
    if file is not None and found:
        options = (("--select", select), ("--ignore", ignore))
        write_audit_page(found[0], file, [f"{name} {one}" for name, given in options for one in given])


def split_codes(options: list[str]) -> list[str]:
    """Split options such as `--select BW1,BW203` into codes."""
    return [code.strip() for option in options for code in option.split(",") if code.strip()]


def _audit_one(
    path: str, select: list[str], ignore: list[str], *, values: bool, base: str | None, fix: bool
) -> AuditReport | AdapterReport:
    from bowline.auditing.audit_report import AuditReport
    from bowline.auditing.place_audit import audit_place

    with shown_progress(path) as progress:
        report = audit_place(path, values=values, base=base, select=select, ignore=ignore, progress=progress)
    if fix and isinstance(report, AuditReport):
        from bowline.auditing.config_fix import fix_config

        try:
            changed = fix_config(report)
        except ConfigError as error:  # the edit was refused; the findings are still reported
            typer.echo(printable(f"error: {error}"), err=True)
            return report
        if changed:
            for line in changed:
                typer.echo(printable(f"{path}: {line}"), err=True)
            return audit_place(path, values=values, base=base, select=select, ignore=ignore)
    return report
