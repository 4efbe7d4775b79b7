"""Classes of rows by id: added, special, never trained and odd rows, each on a line of its own."""

from __future__ import annotations

import numpy as np

from bowline.page.elements import Html, element
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import BOTTOM, TOP, frame, linear
from bowline.page.row_list import RowList

__all__ = ["classes_panel"]

LANE = 26
MARKS = 368
"""Marks on one line: one a pixel."""
LINKED = 12


def classes_panel(rows: RowList) -> Html:
    """A plot of each class of rows over the ids of the vocabulary."""
    found = [one for one in rows.classes if one.ids.size]
    if not found:
        return panel("Rows that stand out", None, "No row is special, added, equal to another, or odd.", None)
    ids = linear(0, max(1, rows.total - 1))
    content = []
    for lane, one in enumerate(found):
        y = TOP + lane * LANE
        content.append(element("text", f"{one.label} ({one.ids.size:,})", x=ids.x(0), y=y + 9, class_="tick"))
        places = np.unique(np.rint([ids.x(float(row)) for row in _thinned(one.ids).tolist()]))
        content.extend(element("rect", x=x - 1, y=y + 13, width=2, height=8, class_="mark") for x in places.tolist())
    drawing = frame(
        content,
        label="Where in the vocabulary the classes of rows are",
        x=ids,
        x_label="row id",
        height=TOP + LANE * len(found) + BOTTOM,
    )
    table = data_table(
        "Classes of rows",
        ("class", "rows", "which"),
        [(element("b", one.label), f"{one.ids.size:,}", rows.links(one.ids, LINKED)) for one in found],
        words=1,
    )
    meanings = element("ul", [element("li", element("b", one.label), f": {one.meaning}") for one in found])
    note = "Classes of rows by id; a row can be in several."
    return panel("Rows that stand out", drawing, [note, meanings], table)


def _thinned(ids: np.ndarray) -> np.ndarray:
    return ids if ids.size <= MARKS else ids[np.linspace(0, ids.size - 1, MARKS).astype(int)]
