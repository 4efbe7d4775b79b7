"""Writes the comparison of two checkpoints for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from bowline.auditing.checkpoint_comparison import ComparisonReport, EndComparison
from bowline.auditing.rules.token_texts import runs
from bowline.auditing.verdict import verdict
from bowline.checkpoint.formats.strict_json import shown
from bowline.wording import joined, printable

__all__ = ["change_summary", "render_comparison"]

MOST_ROWS = 10


def render_comparison(report: ComparisonReport) -> str:
    """The two verdicts, which rows were paired, and for each end how many moved, how far, and which moved most."""
    return "\n".join(map(printable, _lines(report)))


def change_summary(end: EndComparison) -> str:
    """A phrase about one end: how many rows moved, how far, and what that looks like."""
    if end.changes is None:
        return f"not compared: {end.reason}"
    pairs, moved = end.pairs.before.size, end.moved
    if not moved.size:
        return f"equal in all {pairs} rows" if pairs != 1 else "equal in the only row"
    relative = end.changes.relative[moved]
    finite = relative[np.isfinite(relative)]
    by = (
        f", by {100 * np.median(finite):.3g} % of their norm in the median and {100 * finite.max():.3g} % at most"
        if finite.size
        else ""
    )
    pattern = f"; looks like {end.pattern}" if end.pattern else ""
    return f"{moved.size} of {pairs} rows moved{by}{pattern}"


def _moved(relative: float, cosine: float) -> str:
    if np.isnan(relative):
        return "not finite on one side"
    if np.isinf(relative):
        return "was zero"
    return f"{100 * relative:.3g} % of its norm, {'is zero' if np.isnan(cosine) else f'cosine {cosine:.4f}'}"


def _lines(report: ComparisonReport) -> Iterator[str]:
    for label, one in (("before", report.before), ("after", report.after)):
        yield f"{label:<8} {one.evidence.location}: {verdict(one.evidence)}"
    pairs = report.pairs
    yield f"{'rows':<8} {pairs.before.size} paired by {pairs.by}"
    for label, ids in (("before", pairs.only_before), ("after", pairs.only_after)):
        if ids.size:
            yield f"{'':<8} {ids.size} only {label} ({runs(ids)})"
    if pairs.renamed.size:
        yield f"{'':<8} {pairs.renamed.size} with another token after ({runs(pairs.renamed)})"
    tokens = report.tokens(report.before.evidence)
    for end in report.ends:
        names = end.before.name if end.before.name == end.after.name else f"{end.before.name} and {end.after.name}"
        yield f"{joined(end.ends)} ({names}): {change_summary(end)}"
        yield from _rows(end, tokens)
    yield from report.quantised
    if not report.ends and not report.quantised:
        yield "no end is stored in both, so no rows were compared"
    yield "Equal." if report.equal else "Different." if report.different else "Not all rows were compared."


def _rows(end: EndComparison, tokens: Mapping[int, str]) -> Iterator[str]:
    if end.changes is None:
        return
    for at in end.moved[:MOST_ROWS].tolist():
        before, after = int(end.pairs.before[at]), int(end.pairs.after[at])
        ids = f"{before}" if before == after else f"{before} (after: {after})"
        token = f" {shown(tokens[before])}" if before in tokens else ""
        relative, cosine = end.changes.relative[at], end.changes.cosine[at]
        yield f"  row {ids}{token}: {_moved(relative, cosine)}"
    rest = end.moved.size - MOST_ROWS
    if rest > 0:
        yield f"  and {rest} more"
