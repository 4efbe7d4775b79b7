"""The padding row among the rows beside it."""

from __future__ import annotations

import numpy as np

from bowline.page.elements import Html, element
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, frame, linear
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["padding_panel"]

BESIDE = 7
"""Rows on each side of the padding row."""
CLASSES = {
    "zero": "a row of zeros: in a tied head its logit is 0, or its bias, for every hidden state",
    "mean": "the mean of the other rows",
    "copy": "a copy of another row",
    "init-like": "as it was drawn: no gradient reached it",
    "trained": "a trained row like any other: nothing kept it at zero",
    "not-finite": "not finite",
}


def padding_panel(view: TableView, rows: RowList, pad: int, row_class: str) -> Html:
    """The norms of the rows with ids beside the padding row's."""
    first = max(0, min(pad - BESIDE, view.shape[0] - 2 * BESIDE - 1))
    ids = list(range(first, min(view.shape[0], first + 2 * BESIDE + 1)))
    norms = [float(view.norms[row]) for row in ids]
    finite = view.norms[np.isfinite(view.norms)]
    median = float(np.median(finite)) if finite.size else 0.0
    y = linear(0.0, max([median, *(norm for norm in norms if np.isfinite(norm))]) * 1.08 or 1.0)
    width = (WIDTH - LEFT - RIGHT) / len(ids)
    bars = []
    for at, (row, norm) in enumerate(zip(ids, norms, strict=True)):
        x = LEFT + at * width
        top = y.y(norm if np.isfinite(norm) else 0.0)
        bars.append(
            element(
                "rect",
                x=x + 2,
                y=top,
                width=width - 4,
                height=max(1.0, HEIGHT - BOTTOM - top),
                class_="bar chosen" if row == pad else "bar",
            )
        )
        if row == pad or at % 3 == 0:
            text = f"{row}"
            bars.append(
                element("text", text, x=x + width / 2, y=HEIGHT - BOTTOM + 15, class_="tick", text_anchor="middle")
            )
    line = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y.y(median), y2=y.y(median), class_="reference")
    drawing = frame(
        bars,
        line,
        label=f"The norms of the rows beside the padding row {pad}",
        y=y,
        x_label="row id",
        y_label="norm ‖e‖",
    )
    share = float((finite < view.norms[pad]).mean()) if finite.size and np.isfinite(view.norms[pad]) else None
    where = (
        f" Its norm is {view.norms[pad]:.3g}; {100 * share:.1f} % of all rows are shorter." if share is not None else ""
    )
    note = [
        "The padding row ",
        rows.link(pad),
        f" is {CLASSES.get(row_class, row_class)}.{where} The dashed line is the median of all rows.",
    ]
    table = data_table(
        "The padding row and the rows beside it",
        ("row", "norm"),
        [(rows.link(row), f"{norm:.4g}") for row, norm in zip(ids, norms, strict=True)],
    )
    return panel("The padding row", drawing, note, table)
