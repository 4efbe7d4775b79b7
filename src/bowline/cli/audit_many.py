"""`bowline audit --output-format jsonl`: a line for each place, a bar while they are audited, and a summary."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import typer

from bowline.wording import printable

__all__ = ["audit_many"]


def audit_many(
    places: Iterable[str],
    options: Mapping[str, Any],
    *,
    jobs: int,
    time_limit: float,
    output_file: Path | None,
) -> int:
    """Audit the places and write a line for each, to `output_file` or to stdout; returns the exit code.

    A place that is there twice is audited once. One that `output_file` has already is not audited again, and its result
    counts in the exit code.
    """
    from bowline.auditing.queue.audit_queue import audited
    from bowline.auditing.queue.results_file import ResultsFile
    from bowline.auditing.report.json_format import render_line

    given = list(places)
    wanted = list(dict.fromkeys(given))
    codes: Counter[str] = Counter()
    found: Counter[int] = Counter()
    with nullcontext() if output_file is None else ResultsFile(output_file) as results:
        done: Mapping[str, int] = {} if results is None else results.done
        left = [place for place in wanted if place not in done]
        with _bar(len(left)) as advance:
            for outcome in audited(left, jobs=jobs, time_limit=time_limit, options=options):
                line = render_line(outcome.path, outcome.record)
                if results is None:
                    typer.echo(line)
                else:
                    results.add(line)
                found[outcome.code] += 1
                codes.update(outcome.codes)
                advance()
    for text in _summary(found, codes, twice=len(given) - len(wanted), before=len(wanted) - len(left)):
        typer.echo(printable(text), err=True)
    before = [done[place] for place in wanted if place in done]
    return max([*(code for code, count in found.items() if count), *before], default=0)


def _summary(found: Counter[int], codes: Counter[str], *, twice: int, before: int) -> Iterator[str]:
    """Yields the number of places by result, then each finding with the number of places that have it."""
    total = sum(found.values())
    parts = [f"{found[0]:,} clean", f"{found[1]:,} with findings", f"{found[2]:,} could not be audited"]
    yield f"{total:,} audited: {', '.join(parts)}"
    if before:
        yield f"{before:,} more {'was' if before == 1 else 'were'} in the file already"
    if twice:
        yield f"{twice:,} listed more than once"
    if codes:
        from bowline.auditing.rules import all_rules

        names = {rule.code: rule.name for rule in all_rules()}
        for code, count in sorted(codes.items(), key=lambda each: (-each[1], each[0])):
            yield f"{count:>7,}  {code} {names.get(code, '')}"


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A bar on stderr, if that is a terminal; gives a function that counts one more."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=total)
        yield lambda: bars.advance(task)
