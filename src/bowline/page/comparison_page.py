"""The comparison of two checkpoints as a page: what became of the tie, which rows moved, and how far."""

from __future__ import annotations

from datetime import UTC, date, datetime

import numpy as np

from bowline import __version__
from bowline.auditing.checkpoint_comparison import ComparisonReport, EndComparison
from bowline.auditing.checkpoint_table import CheckpointTable
from bowline.auditing.evidence import Evidence
from bowline.auditing.progress import Progress
from bowline.auditing.report.comparison_text import change_summary
from bowline.auditing.rules.token_texts import runs
from bowline.auditing.verdict import verdict
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.markup import shortened
from bowline.page.document import document, section
from bowline.page.elements import Child, Html, element
from bowline.page.ends_drawing import stored_ends_drawing
from bowline.page.panels.by_id import norm_panel
from bowline.page.panels.eigenvalues import spectrum_panel
from bowline.page.panels.row_moves import moves_panel
from bowline.page.row_list import Ids, RowClass, RowList, texts_of
from bowline.page.search import search_box
from bowline.page.search_data import Changes, SearchTable, packed_search
from bowline.page.table_view import TableView, view_table
from bowline.wording import joined

__all__ = ["comparison_page"]

MOST_LOOKED_AT = 2000
"""Rows of those that moved most whose neighbours are on the page in any case."""


def comparison_page(
    report: ComparisonReport,
    before: Checkpoint,
    after: Checkpoint,
    *,
    on: date | None = None,
    progress: Progress | None = None,
) -> str:
    """The page about two compared checkpoints, one HTML file that requests nothing.

    `before` and `after` are the same two, open: their tables are read again. `on` is the day that the page names, today
    (UTC) if it is not given.

    Raises:
        CheckpointError: a table cannot be read.
    """
    day = (on or datetime.now(UTC).date()).isoformat()
    data, rows = _rows(report, before, after, progress or Progress())
    sections = [("ends", "Ends"), ("rows", "Rows")]
    return document(
        f"Bowline: {shortened(report.before.evidence.location)} and {shortened(report.after.evidence.location)}",
        _verdict(report, day),
        section("ends", "The ends of both", _ends(report)),
        section("rows", "The rows of both", rows),
        element("footer", element("p", f"Bowline {__version__}, {day}. This page is one file and requests nothing.")),
        navigation=[element("a", words, href=f"#{name}") for name, words in sections],
        data=data,
    )


def _verdict(report: ComparisonReport, day: str) -> Html:
    said = "Both vocabularies are equal" if report.equal else _difference(report)
    parts = [f"{joined(end.ends)}: {change_summary(end)}" for end in report.ends]
    places = [element("code", shortened(one.evidence.location)) for one in (report.before, report.after)]
    return element(
        "section",
        element("p", places[0], " before, ", places[1], " after", class_="place"),
        element("h1", said, id="verdict", tabindex="-1"),
        element("ul", [element("li", part) for part in parts]),
        element("p", f"{_pairing(report)} Compared on {day} by Bowline {__version__}.", class_="summary"),
        class_="verdict good" if report.equal else "verdict doubtful",
        aria_labelledby="verdict",
    )


def _difference(report: ComparisonReport) -> str:
    """What differs, in one sentence: the end in which most rows moved, and the rows that came and went."""
    most = max((end.moved.size for end in report.ends), default=0)
    said = [f"{most:,} of {report.pairs.before.size:,} rows moved" if most else "No row moved"]
    for ids, what in ((report.pairs.only_before, "are gone"), (report.pairs.only_after, "are new")):
        if ids.size:
            said.append(f"{ids.size:,} {what}")
    return joined(said)


def _pairing(report: ComparisonReport) -> str:
    pairs = report.pairs
    by = "by id" if pairs.by == "id" else "by token, since a token has different ids in the two"
    alone = [
        f"{ids.size:,} rows are only in the checkpoint {label} ({runs(ids)})"
        for label, ids in (("before", pairs.only_before), ("after", pairs.only_after))
        if ids.size
    ]
    return f"{pairs.before.size:,} rows are paired {by}.{''.join(f' {one}.' for one in alone)}"


def _ends(report: ComparisonReport) -> list[Child]:
    parts: list[Child] = []
    for label, one in (("Before", report.before), ("After", report.after)):
        tie = one.evidence.main_tie
        parts.append(element("h3", f"{label}: ", element("code", shortened(one.evidence.location))))
        parts.append(element("p", f"{_sentence(verdict(one.evidence))}."))
        parts.append(stored_ends_drawing(one.evidence, tie) if tie else None)
    return parts


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _rows(report: ComparisonReport, before: Checkpoint, after: Checkpoint, progress: Progress) -> tuple[Child, Child]:
    ends = [end for end in report.ends if end.changes is not None]
    if not ends:
        reasons = [f"{joined(end.ends)}: {end.reason}" for end in report.ends] or ["no end is stored in both"]
        return None, element("p", f"No rows were compared: {'; '.join(reasons)}.")
    both = _Both(report)
    moved = ends[0].pairs.before[ends[0].moved[:MOST_LOOKED_AT]]
    partners = ends[0].pairs.after[ends[0].moved[:MOST_LOOKED_AT]]
    tables: list[SearchTable] = []
    panels: list[Child] = []
    changes: list[Changes] = []
    for end in ends:
        assert end.changes is not None
        name = joined(end.ends)
        views = [
            _view(before, end.before.name, f"{name} before", both.first, moved, progress),
            _view(after, end.after.name, f"{name} after", both.second, partners, progress),
        ]
        tables += [
            SearchTable(view=view, positions=rows.places[: view.shape[0]] if rows.places is not None else rows.ids)
            for view, rows in zip(views, (both.first, both.second), strict=True)
        ]
        panels.append(moves_panel(f"How far rows moved: {name}", end.changes, end.pairs.before, both.first))
        panels += [norm_panel(view, rows) for view, rows in zip(views, (both.first, both.second), strict=True)]
        panels += [spectrum_panel(view) for view in views]
        changes.append(Changes(label=f"{name} moved by", relative=both.spread(end)))
    plots = element("div", panels, class_="panels")
    data, limits = packed_search(both.page, tables, changes, names=both.names, beside=len(plots))
    return data, [search_box(limits), plots]


def _view(checkpoint: Checkpoint, name: str, label: str, rows: RowList, first: Ids, progress: Progress) -> TableView:
    source = CheckpointTable(checkpoint, checkpoint.tensors[name], progress)
    return view_table(source, label=label, tensor=name, first=first, among=rows.ids)


class _Both:
    """The rows of both vocabularies in one list: the pairs, then the rows that are only in one of them."""

    def __init__(self, report: ComparisonReport) -> None:
        pairs = report.pairs
        self._pairs = pairs
        count = pairs.before.size
        first = np.full(count + pairs.only_before.size, -1, np.int64)
        second = np.full(count + pairs.only_after.size, -1, np.int64)
        first[pairs.before], second[pairs.after] = np.arange(count), np.arange(count)
        first[pairs.only_before] = count + np.arange(pairs.only_before.size)
        second[pairs.only_after] = count + pairs.only_before.size + np.arange(pairs.only_after.size)
        total = count + pairs.only_before.size + pairs.only_after.size
        texts = [_texts(report.before.evidence, first.size), _texts(report.after.evidence, second.size)]
        merged, names = [""] * total, [""] * total
        for row, place in enumerate(second.tolist()):
            merged[place], names[place] = texts[1][row], f"{row} after"
        for row, place in enumerate(first.tolist()):
            merged[place], names[place] = texts[0][row], f"{row} before"
        for place, (one, other) in enumerate(zip(pairs.before.tolist(), pairs.after.tolist(), strict=True)):
            names[place] = f"{one}" if one == other else f"{one} (after: {other})"
        alone = [
            RowClass(label=f"only {label}", meaning="", ids=start + np.arange(ids.size))
            for label, ids, start in (
                ("before", pairs.only_before, count),
                ("after", pairs.only_after, count + pairs.only_before.size),
            )
            if ids.size
        ]
        self.first = RowList(ids=np.arange(first.size), total=first.size, texts=texts[0], places=first)
        self.second = RowList(ids=np.arange(second.size), total=second.size, texts=texts[1], places=second)
        self.page = RowList(ids=np.arange(total), total=total, texts=merged, classes=alone)
        self.names = names if pairs.by == "token" else []

    def spread(self, end: EndComparison) -> np.ndarray:
        """The change of each row of the page's list."""
        relative = np.full(self.page.total, np.nan)
        if end.changes is not None and self.first.places is not None:
            relative[self.first.places[end.pairs.before]] = end.changes.relative
        return relative


def _texts(evidence: Evidence, total: int) -> list[str]:
    ids = evidence.tokenizer.ids if evidence.tokenizer else {}
    return texts_of(ids, np.arange(total), total)
