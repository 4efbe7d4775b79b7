"""Plots the distance of each row of one table from its partner in another, and lists the largest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bowline.geometry import RowChanges
from bowline.page.elements import Html, fragment
from bowline.page.panels.by_id import id_plot, id_table
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import count_label, linear
from bowline.page.row_list import RowList

__all__ = ["moves_panel"]

LISTED = 40


def moves_panel(title: str, changes: RowChanges, ids: npt.NDArray[np.int64], rows: RowList) -> Html:
    """The distance of each pair in percent of the first row's norm. `ids` are the rows of the pairs, ascending."""
    percent = 100 * changes.relative
    every = np.full(rows.total, np.nan)
    every[ids] = percent
    finite = percent[np.isfinite(percent)]
    moved = ~changes.same
    order = np.argsort(-np.nan_to_num(changes.relative, nan=np.inf), kind="stable")
    farthest = [int(at) for at in order[:LISTED] if moved[at]]
    table = data_table(
        f"The rows that are farthest: {title}",
        ("row", "distance", "of the norm", "cosine"),
        [
            (
                rows.link(int(ids[at])),
                _shown(f"{changes.distance[at]:.4g}", changes.distance[at]),
                "was zero" if np.isposinf(percent[at]) else _shown(f"{percent[at]:.3g} %", percent[at]),
                _shown(f"{changes.cosine[at]:.4f}", changes.cosine[at], "none"),
            )
            for at in farthest
        ],
    )
    if not moved.any():
        return panel(title, None, f"All {count_label(moved.size, 'pair')} of rows are equal.", None)
    scale = linear(0.0, max(float(finite.max(initial=0.0)) * 1.05, 1e-9))
    drawing = id_plot(every, scale, f"{title}: the distance of each pair of rows", "distance, % of ‖e‖")
    note = (
        f"{count_label(int(moved.sum()), 'row')} differ and {int((~moved).sum()):,} are equal. The line is the median "
        "of a stretch of ids, the band its smallest to its largest distance."
    )
    return panel(title, drawing, note, fragment(table, id_table(f"By id, in percent: {title}", every)))


def _shown(text: str, value: float, otherwise: str = "not finite") -> str:
    return text if np.isfinite(value) else otherwise
