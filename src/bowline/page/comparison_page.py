"""The comparison of two checkpoints as a page: what became of the tie, which rows moved, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from bowline.page.plot_frame import count_label
from bowline.page.row_list import Ids, RowClass, RowList, listed_rows, texts_of
from bowline.page.search import search_box
from bowline.page.search_data import Changes, SearchTable, packed_search
from bowline.page.table_view import TableView, view_table
from bowline.wording import joined

__all__ = ["comparison_page"]

ROOM = 2_600_000
"""Characters of a page for rows and neighbours."""
ROW_ROOM = 1_300_000
NEIGHBOURS_COST = 34
"""Characters that the neighbours of a row take at most: ids and cosines."""
NAME_COST = 7
"""Characters of a row's two ids."""
VALUE_COST = 4 / 3
"""Characters of a norm or a change in one byte."""
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
    said = "All rows of both are equal" if report.equal else _difference(report)
    parts = [*(f"{joined(end.ends)}: {change_summary(end)}" for end in report.ends), *report.quantised]
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
    """The difference in one sentence: the end in which most rows moved, and the rows that came and went."""
    most = max((end.moved.size for end in report.ends), default=0)
    compared = [name for end in report.ends if end.changes is not None for name in end.ends]
    every = all(end.changes is not None for end in report.ends) and not report.quantised
    where = "" if every else f" in the {joined(compared)}"
    unmoved = f"No row moved{where}" if compared else "No row was compared"
    said = [f"{most:,} of {report.pairs.before.size:,} rows moved" if most else unmoved]
    for ids, what in ((report.pairs.only_before, "gone"), (report.pairs.only_after, "new")):
        if ids.size:
            said.append(f"{ids.size:,} {'is' if ids.size == 1 else 'are'} {what}")
    return joined(said)


def _pairing(report: ComparisonReport) -> str:
    pairs = report.pairs
    by = "by id" if pairs.by == "id" else "by token, since a token has different ids in the two"
    said = [f"{_rows_are(pairs.before.size)} paired {by}."]
    for label, ids in (("before", pairs.only_before), ("after", pairs.only_after)):
        if ids.size:
            said.append(f"{_rows_are(ids.size)} only in the checkpoint {label} ({runs(ids)}).")
    if pairs.renamed.size:
        has = "has" if pairs.renamed.size == 1 else "have"
        said.append(f"{pairs.renamed.size:,} of them {has} another token after ({runs(pairs.renamed)}).")
    return " ".join(said)


def _rows_are(count: int) -> str:
    return f"{count_label(count, 'row')} {'is' if count == 1 else 'are'}"


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
        reasons = [*(f"{joined(end.ends)}: {end.reason}" for end in report.ends), *report.quantised]
        reasons = reasons or ["no end is stored in both"]
        return None, element("p", f"No rows were compared: {'; '.join(reasons)}.")
    both = _Both(report)
    tables: list[SearchTable] = []
    panels: list[Child] = []
    changes: list[Changes] = []
    for end in ends:
        assert end.changes is not None
        name = joined(end.ends)
        panels.append(moves_panel(f"How far rows moved: {name}", end.changes, end.pairs.before, both.first))
        changes.append(Changes(label=f"{name} moved by", relative=both.spread(end)))
    for table in _tables(ends):
        checkpoint, rows = (before, both.first) if table.side == "before" else (after, both.second)
        places, moved = (both.before, both.moved[0]) if table.side == "before" else (both.after, both.moved[1])
        view = _view(checkpoint, table, rows, moved, both.most_looked_up, progress)
        tables.append(SearchTable(view=view, positions=places[: view.shape[0]]))
        panels += [norm_panel(view, rows), spectrum_panel(view)]
    plots = element("div", panels, class_="panels")
    data, limits = packed_search(both.page, tables, changes, names=both.names, beside=len(plots))
    return data, [search_box(limits), plots]


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of one side: a tied model's one matrix is that of both ends."""

    side: str
    tensor: str
    ends: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{joined(self.ends)} {self.side}"


def _tables(ends: Sequence[EndComparison]) -> list[_Table]:
    """The tables of both sides, each once, with the ends that it serves."""
    serves: dict[tuple[str, str], list[str]] = {}
    for end in ends:
        for side, tensor in (("before", end.before), ("after", end.after)):
            serves.setdefault((side, tensor.name), []).extend(end.ends)
    return [_Table(side, tensor, tuple(names)) for (side, tensor), names in serves.items()]


def _view(checkpoint: Checkpoint, table: _Table, rows: RowList, first: Ids, most: int, progress: Progress) -> TableView:
    source = CheckpointTable(checkpoint, checkpoint.tensors[table.tensor], progress)
    return view_table(source, label=table.label, tensor=table.tensor, first=first, among=rows.ids, most=most)


class _Both:
    """The rows of both vocabularies in one list: the pairs, then the rows that are only in one of them.

    page: the rows that the page lists, all or some. before, after: the place in it of each row of one vocabulary, -1
    for a row that is not listed. first, second: the same rows as the plots of one vocabulary need them.
    moved: the rows of each side that moved most in any end. most_looked_up: the rows of each table whose neighbours fit
    the page.
    """

    def __init__(self, report: ComparisonReport) -> None:
        pairs = report.pairs
        self._pairs = pairs
        count, gone, new = pairs.before.size, pairs.only_before.size, pairs.only_after.size
        compared = [end for end in report.ends if end.changes is not None]
        places_moved = [self._places(end)[end.moved[:MOST_LOOKED_AT]] for end in compared]
        moved = np.concatenate([np.empty(0, np.int64), *places_moved])
        self.moved = pairs.before[moved], pairs.after[moved]
        tables = len(_tables(compared))
        row_cost = VALUE_COST * (tables + len(compared)) + (NAME_COST if pairs.by == "token" else 0)
        listed = listed_rows(count + gone + new, moved, int(ROW_ROOM / row_cost))
        self.most_looked_up = int((ROOM - listed.size * row_cost) / NEIGHBOURS_COST / tables)
        ids = (
            np.concatenate([pairs.before, pairs.only_before, np.full(new, -1)]),
            np.concatenate([pairs.after, np.full(gone, -1), pairs.only_after]),
        )
        sides = []
        texts: list[Sequence[str]] = []
        for one, evidence in zip(ids, (report.before.evidence, report.after.evidence), strict=True):
            places = np.full(one.max(initial=-1) + 1, -1)
            here = np.flatnonzero(one[listed] >= 0)
            places[one[listed][here]] = here
            sides.append(places)
            texts.append(_texts(evidence, one[listed], places.size))
        self.before, self.after = sides
        self.first, self.second = (
            RowList(ids=rows, total=places.size, texts=_texts(one.evidence, rows, places.size), places=places[rows])
            for one, places in zip((report.before, report.after), sides, strict=True)
            for rows in (np.flatnonzero(places >= 0),)
        )
        alone = [
            RowClass(label=f"only {label}", meaning="", ids=start + np.arange(size))
            for label, size, start in (("before", gone, count), ("after", new, count + gone))
            if size
        ]
        self.page = RowList(
            ids=listed,
            total=count + gone + new,
            texts=[one or other for one, other in zip(*texts, strict=True)],
            classes=alone,
        )
        numbers = zip(*(one[listed].tolist() for one in ids), strict=True)
        self.names = [_name(one, other) for one, other in numbers] if pairs.by == "token" else []

    def spread(self, end: EndComparison) -> np.ndarray:
        """The change of each row of the page's list."""
        relative = np.full(self.page.total, np.nan)
        if end.changes is not None:
            relative[self._places(end)] = end.changes.relative
        return relative[self.page.ids]

    def _places(self, end: EndComparison) -> Ids:
        """The place of each pair of an end among all pairs: an end can be shorter than the other."""
        rows = [tensor.shape[0] if tensor.shape else 0 for tensor in (end.before, end.after)]
        return np.flatnonzero((self._pairs.before < rows[0]) & (self._pairs.after < rows[1]))


def _name(before: int, after: int) -> str:
    """A row's ids on both sides; -1 where it has none."""
    if min(before, after) < 0:
        return f"{before} before" if before >= 0 else f"{after} after"
    return f"{before}" if before == after else f"{before} (after: {after})"


def _texts(evidence: Evidence, rows: Ids, total: int) -> list[str]:
    """The tokens of some rows; empty for -1."""
    listed = rows[rows >= 0]
    found = iter(texts_of(evidence.tokenizer.ids if evidence.tokenizer else {}, listed, total))
    return [next(found) if row >= 0 else "" for row in rows.tolist()]
