"""The search box: a token's norm, classes, change and nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from bowline.page.elements import Html, element, fragment
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["search_box"]


def search_box(rows: RowList, views: Sequence[TableView], cut: int) -> Html:
    """The box and the places of its results, with what it does not hold said beside it."""
    limits = []
    if rows.ids.size < rows.total:
        limits.append(f"The page lists {rows.ids.size:,} of the {rows.total:,} rows.")
    for view in views:
        if view.looked_up.size < (view.norms > 0).sum():
            limits.append(
                f"Neighbours in {view.label} are given for {view.looked_up.size:,} of its {view.shape[0]:,} rows: "
                "those that stand out, and others spread over the ids. They are the nearest of all rows."
            )
    if cut:
        limits.append(f"Token texts are cut to {cut} characters.")
    return fragment(
        element(
            "form",
            element("label", "Find a token or a row id", for_="query"),
            element(
                "input", type="search", id="query", autocomplete="off", spellcheck="false", placeholder="the, or 1996"
            ),
            element("p", "The search needs JavaScript.", id="matches-note", role="status"),
            element("ul", id="matches"),
            element("div", id="entry", tabindex="-1", aria_live="polite"),
            element("p", " ".join(limits), class_="limits") if limits else None,
            role="search",
            id="search",
        )
    )
