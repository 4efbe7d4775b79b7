"""A block of E Eᵀ: the products of rows spread over the table."""

from __future__ import annotations

import numpy as np

from bowline.page.elements import Html, element
from bowline.page.panels.panel import data_table, panel
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["block_panel"]

CELL = 12
FAINTEST = 0.02
"""Products below this share of the largest are left white."""


def block_panel(view: TableView, rows: RowList) -> Html | None:
    """A block of E Eᵀ as a grid of cells; `None` for a table without two usable rows."""
    count = view.block_rows.size
    if count < 2:
        return None
    strongest = float(np.abs(view.block).max()) or 1.0
    cells = []
    for at, line in enumerate(view.block / strongest):
        for across, value in enumerate(line.tolist()):
            if abs(value) >= FAINTEST:
                cells.append(
                    element(
                        "rect",
                        x=across * CELL,
                        y=at * CELL,
                        width=CELL,
                        height=CELL,
                        class_="plus" if value > 0 else "minus",
                        fill_opacity=abs(value),
                    )
                )
    side = count * CELL
    outline = element("rect", x=0, y=0, width=side, height=side, class_="outline")
    drawing = element(
        "svg",
        outline,
        cells,
        viewBox=f"-1 -1 {side + 2} {side + 2}",
        role="img",
        class_="square",
        aria_label=f"The products of {count} rows of {view.tensor}: strong on the diagonal",
    )
    off = view.block[~np.eye(count, dtype=bool)]
    note = (
        f"{count} rows spread over the table, each with each: eᵢ · eⱼ in units of the mean ‖e‖². Blue is positive, "
        f"orange negative. Beside the diagonal the products are {off.min():.2f} to {off.max():.2f}; if E Eᵀ were a "
        "multiple of I, they would be 0."
    )
    lines = [
        (rows.link(int(row)), *(f"{value:.2f}" for value in line))
        for row, line in zip(view.block_rows, view.block, strict=True)
    ]
    table = data_table(f"Products of the rows: {view.label}", ("row", *(f"{row}" for row in view.block_rows)), lines)
    return panel(f"A block of E Eᵀ: {view.label}", drawing, note, table)
