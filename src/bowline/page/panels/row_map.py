"""A map of the rows: their directions, drawn in the plane in which they differ most."""

from __future__ import annotations

import numpy as np

from bowline.page.elements import Html, element
from bowline.page.panels.panel import data_table, panel
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["map_panel"]

WIDTH, HEIGHT, MARGIN = 860, 460, 14
TABLED = 60
NAMED = 26
"""Rows whose tokens are written on the map: the outermost, and others where there is room."""
LABEL_WIDTH, LABEL_HEIGHT = 88, 18


def map_panel(view: TableView, rows: RowList) -> Html | None:
    """The map of a table; `None` with fewer than three usable rows."""
    if view.mapped.size < 3:
        return None
    low, high = view.places.min(axis=0), view.places.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    at = MARGIN + (view.places - low) / span * (np.array([WIDTH, HEIGHT]) - 2 * MARGIN)
    at[:, 1] = HEIGHT - at[:, 1]
    kinds = np.zeros(view.mapped.size, np.int64)
    for number, found in enumerate(rows.classes, start=1):
        kinds[np.isin(view.mapped, found.ids)] = number
    dots = [
        element(
            "circle",
            element("title", f"{row} {rows.text(row)}"),
            cx=x,
            cy=y,
            r=3,
            class_="dot" if kind else "dot plain",
        )
        for row, (x, y), kind in zip(view.mapped.tolist(), at.tolist(), kinds.tolist(), strict=True)
    ]
    labels, named = _labels(at, view, rows)
    drawing = element(
        "svg",
        dots,
        labels,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{view.mapped.size} rows of {view.tensor} as points",
    )
    note = (
        f"{view.mapped.size:,} of {view.shape[0]:,} rows by their direction e / ‖e‖, in the plane of their first two "
        f"principal components, which hold {100 * view.mapped_share:.1f} % of the variance: rows that are close here "
        "may be far apart. Orange points belong to a class of rows that stand out."
    )
    chosen = sorted({*named, *np.linspace(0, view.mapped.size - 1, min(TABLED, view.mapped.size)).astype(int).tolist()})
    table = data_table(
        f"Rows of the map: {view.label}",
        ("row", "first axis", "second axis"),
        [(rows.link(int(view.mapped[one])), *(f"{value:.3f}" for value in view.places[one])) for one in chosen],
    )
    title = f"A map of the rows: {view.label}"
    scrolling = element("div", drawing, class_="scroll map", tabindex="0", role="region", aria_label=title)
    return panel(title, scrolling, note, table, wide=True)


def _labels(at: np.ndarray, view: TableView, rows: RowList) -> tuple[list[Html], list[int]]:
    """The tokens of some rows, far from each other."""
    middle = np.median(at, axis=0)
    order = np.argsort(-np.square((at - middle) / np.array([WIDTH, HEIGHT])).sum(axis=1), kind="stable")
    taken: list[tuple[float, float]] = []
    labels: list[Html] = []
    named: list[int] = []
    for one in order.tolist():
        text = rows.text(int(view.mapped[one]))
        x, y = at[one]
        room = all(abs(x - other[0]) > LABEL_WIDTH or abs(y - other[1]) > LABEL_HEIGHT for other in taken)
        if text and room and len(named) < NAMED:
            right = x > WIDTH - LABEL_WIDTH
            taken.append((x, y))
            named.append(one)
            labels.append(
                element(
                    "text",
                    text[:12],
                    x=x - 6 if right else x + 6,
                    y=y + 4,
                    class_="tick",
                    text_anchor="end" if right else None,
                )
            )
    return labels, named
