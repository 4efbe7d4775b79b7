"""The report on one checkpoint as a page: verdict, findings, loaders, and the rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime

import numpy as np

from bowline import __version__
from bowline.auditing.audit_report import AuditReport
from bowline.auditing.checkpoint_table import CheckpointTable
from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.progress import Progress
from bowline.auditing.report.scope import audit_command, checked, not_checked
from bowline.auditing.verdict import verdict
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.geometry import row_changes
from bowline.markup import shortened
from bowline.page.document import document, section
from bowline.page.elements import Child, Html, element, with_code
from bowline.page.ends_drawing import loader_table, stored_ends_drawing
from bowline.page.findings import copyable, findings_list, findings_summary
from bowline.page.panels.by_id import norm_panel
from bowline.page.panels.classes import classes_panel
from bowline.page.panels.eigenvalues import spectrum_panel
from bowline.page.panels.gram_block import block_panel
from bowline.page.panels.padding import padding_panel
from bowline.page.panels.row_map import map_panel
from bowline.page.panels.row_moves import moves_panel
from bowline.page.row_list import RowList
from bowline.page.search import search_box
from bowline.page.search_data import Changes, SearchTable, packed_search
from bowline.page.table_view import TableView
from bowline.page.vocabulary import vocabulary_rows, vocabulary_views
from bowline.tie import TieState

__all__ = ["audit_page"]


def audit_page(
    report: AuditReport,
    checkpoint: Checkpoint,
    *,
    chosen: Sequence[str] = (),
    on: date | None = None,
    progress: Progress | None = None,
) -> str:
    """The page about an audited checkpoint, one HTML file that requests nothing.

    `checkpoint` is the same one, open: its tables are read again. `chosen` are the options that chose rules, which
    the page names beside the findings; `on` is the day that it names, today (UTC) if it is not given. After an audit of
    headers only the page has no plots, and says so.

    Raises:
        CheckpointError: a table cannot be read.
    """
    evidence = report.evidence
    data, vocabulary = _vocabulary(evidence, checkpoint, progress or Progress())
    day = (on or datetime.now(UTC).date()).isoformat()
    sections = [("findings", "Findings"), ("loaders", "Loaders"), ("scope", "Checked"), ("vocabulary", "Vocabulary")]
    return document(
        f"Bowline: {shortened(evidence.location)}",
        _verdict(report, day),
        section("findings", "Findings", _chosen(chosen), findings_list(report.findings, evidence.location)),
        section("loaders", "What loaders make of it", _loaders(evidence)),
        section("scope", "What was checked, and what was not", _scope(evidence)),
        section("vocabulary", "The rows of the vocabulary", vocabulary),
        _footer(evidence, day),
        navigation=[element("a", words, href=f"#{name}") for name, words in sections],
        data=data,
    )


def _chosen(options: Sequence[str]) -> Html | None:
    if not options:
        return None
    return element("p", "Only some rules were asked for: ", element("code", " ".join(options)), ".")


def _verdict(report: AuditReport, day: str) -> Html:
    evidence, worst = report.evidence, next(iter(report.findings), None)
    tone = "good" if report.clean else "bad" if worst and worst.severity == "error" else "doubtful"
    tie = evidence.main_tie
    flag = (
        element("p", "The config says: ", element("code", str(evidence.declaration.flag)), ".")
        if evidence.config is not None and not evidence.gguf_file
        else None
    )
    said = verdict(evidence)
    return element(
        "section",
        element("p", element("code", shortened(evidence.location)), f", {_class_of(evidence)}", class_="place"),
        element("h1", said[:1].upper() + said[1:], id="verdict", tabindex="-1"),
        element(
            "p",
            f"{findings_summary(report.findings).capitalize()}. Audited on {day} by Bowline {__version__}.",
            class_="summary",
        ),
        stored_ends_drawing(evidence, tie) if tie else None,
        flag,
        class_=f"verdict {tone}",
        aria_labelledby="verdict",
    )


def _class_of(evidence: Evidence) -> str:
    architecture = evidence.declaration.architecture
    if architecture is None:
        return "no class named"
    return f"{shortened(architecture)}{' (not known to Bowline)' if evidence.declaration.inferred else ''}"


def _loaders(evidence: Evidence) -> Child:
    ties: list[TieEvidence] = sorted(evidence.ties, key=lambda tie: tie is not evidence.main_tie)
    if not ties:
        return element("p", "The checkpoint has no tie, so there is nothing that loaders could make of one.")
    note = element(
        "p", "Predicted by each loader's own rules, which were compared with these versions run; nothing was loaded."
    )
    parts: list[Child] = [note]
    for tie in ties:
        state = tie.state.value if tie.state else "not compared"
        difference = (
            f"; {tie.difference.rows_differing:,} rows differ, {tie.difference.extent}" if tie.difference else ""
        )
        parts.append(element("h3", element("code", tie.tie.target), " and ", element("code", tie.tie.source)))
        parts.append(element("p", f"Stored: {state}{difference}."))
        parts.append(loader_table(evidence, tie) or element("p", "No loader is predicted for this format."))
    return parts


def _scope(evidence: Evidence) -> Html:
    return element(
        "div",
        element(
            "div",
            element("h3", "Checked"),
            element("ul", [element("li", with_code(one)) for one in checked(evidence)]),
        ),
        element(
            "div",
            element("h3", "Not checked"),
            element("ul", [element("li", with_code(one)) for one in not_checked(evidence)]),
        ),
        class_="scope",
    )


def _vocabulary(evidence: Evidence, checkpoint: Checkpoint, progress: Progress) -> tuple[Html, Child]:
    if not evidence.values_read:
        return Html(""), element(
            "p",
            "Only headers were read, so no row is known. Without --headers-only this part has plots and a search.",
        )
    total = max((table.rows for table in evidence.tables), default=0)
    rows = vocabulary_rows(evidence, total)
    views = vocabulary_views(evidence, checkpoint, rows, progress)
    if not views:
        return Html(""), element(
            "p",
            "No end is stored as a table of floating-point rows, so there is nothing to plot.",
        )
    changes, change_parts = _difference(evidence, checkpoint, views, rows)
    panels: list[Child] = [classes_panel(rows)]
    if evidence.padding is not None:
        panels.append(padding_panel(views[0], rows, evidence.padding.id, evidence.padding.row_class.value))
    panels += change_parts
    for view in views:
        panels += [norm_panel(view, rows), spectrum_panel(view), block_panel(view, rows)]
    panels += [map_panel(view, rows) for view in views]
    plots = element("div", panels, class_="panels")
    tables = [SearchTable(view=view, positions=rows.positions(np.arange(view.shape[0]))) for view in views]
    data, limits = packed_search(rows, tables, changes, beside=len(plots))
    return data, [search_box(limits), plots]


def _difference(
    evidence: Evidence, checkpoint: Checkpoint, views: list[TableView], rows: RowList
) -> tuple[list[Changes], list[Child]]:
    """The differences of the two ends, row by row; none if they are one matrix or cannot be compared."""
    tie = evidence.main_tie
    if (
        tie is None
        or tie.source is None
        or tie.target is None
        or tie.state not in (TieState.DIVERGED, TieState.INCOMPATIBLE)
    ):
        return [], []
    names = {view.tensor for view in views}
    if {tie.tie.source, tie.tie.target} - names or views[0].shape[1] != views[-1].shape[1]:
        return [], []
    ends = [CheckpointTable(checkpoint, tensor, Progress()) for tensor in (tie.source, tie.target)]
    found = row_changes(*ends)
    every = np.full(rows.total, np.nan)
    every[: found.relative.size] = found.relative
    panel = moves_panel("Where the two ends differ", found, np.arange(found.same.size), rows)
    return [Changes(label="distance of the two ends", relative=every[rows.ids])], [panel]


def _footer(evidence: Evidence, day: str) -> Html:
    return element(
        "footer",
        element("p", f"Bowline {__version__}, {day}. This page is one file and requests nothing. To repeat the audit:"),
        copyable(audit_command(evidence)),
    )
