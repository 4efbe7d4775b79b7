"""Values of rows by id: the range of each stretch of ids as a band, its median as a line, and chosen rows as points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bowline.page.elements import Html, element, fragment
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import LEFT, RIGHT, WIDTH, AxisScale, frame, linear, path, plain
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["id_plot", "id_table", "norm_panel"]

Floats = npt.NDArray[np.float64]

STRETCHES = WIDTH - LEFT - RIGHT
"""Stretches of ids that are drawn: one a pixel."""
TABLED = 16
NAMED = 12
POINTS = 60


def norm_panel(view: TableView, rows: RowList) -> Html:
    """The norm of each row of a table by its id."""
    finite = view.norms[np.isfinite(view.norms)]
    largest = float(finite.max(initial=0.0)) or 1.0
    scale = linear(0.0, largest * 1.05)
    order = np.argsort(np.nan_to_num(view.norms, nan=-1.0), kind="stable")
    ends = [int(row) for row in order if np.isfinite(view.norms[row])]
    extreme = [*ends[: NAMED // 2], *ends[-NAMED // 2 :]] if len(ends) > NAMED else ends
    what = f"The norm of each row of {view.tensor}, by id"
    note = [
        f"The line is the median of a stretch of ids, the band its smallest to its largest norm. Median of all: "
        f"{np.median(finite):.3g}."
        if finite.size
        else "No row is finite.",
    ]
    table = fragment(
        id_table(f"Norms by id: {view.label}", view.norms),
        data_table(
            f"The shortest and the longest rows: {view.label}",
            ("row", "norm"),
            [(rows.link(row), f"{view.norms[row]:.4g}") for row in extreme],
        ),
    )
    return panel(f"Row norms: {view.label}", id_plot(view.norms, scale, what, "norm ‖e‖", extreme), note, table)


def id_plot(values: Floats, scale: AxisScale, label: str, y_label: str, points: Sequence[int] = ()) -> Html:
    """A value of each row over its id; `points` are rows that are drawn one by one."""
    ids = linear(0, max(1, values.size - 1))
    lows, medians, highs = _ranges(values, STRETCHES)
    upper, lower, middle = [], [], []
    for at, (low, median, high) in enumerate(zip(lows, medians, highs, strict=True)):
        x = ids.x((at + 0.5) * values.size / lows.size)
        if np.isfinite(median):
            upper.append((x, scale.y(high)))
            lower.append((x, scale.y(low)))
            middle.append((x, scale.y(median)))
    band = element("path", d=path([*upper, *reversed(lower)], closed=True), class_="band") if upper else None
    line = element("path", d=path(middle), class_="line") if middle else None
    dots = [
        element("circle", cx=ids.x(row), cy=scale.y(values[row]), r=2.5, class_="dot")
        for row in points[:POINTS]
        if np.isfinite(values[row])
    ]
    return frame(band, line, dots, label=label, x=ids, y=scale, x_label="row id", y_label=y_label)


def _ranges(values: Floats, most: int) -> tuple[Floats, Floats, Floats]:
    """The smallest, the median and the largest finite value of each stretch of consecutive rows."""
    pieces = [piece[np.isfinite(piece)] for piece in np.array_split(values, max(1, min(most, values.size)))]
    found = np.array(
        [(piece.min(), np.median(piece), piece.max()) if piece.size else (np.nan,) * 3 for piece in pieces]
    ).reshape(-1, 3)
    return found[:, 0], found[:, 1], found[:, 2]


def id_table(caption: str, values: Floats) -> Html:
    """The range of the values in a few stretches of ids."""
    count = max(1, min(TABLED, values.size))
    bounds = np.linspace(0, values.size, count + 1).astype(int)
    lows, medians, highs = _ranges(values, count)
    rows = [
        (f"{bounds[at]:,} to {bounds[at + 1] - 1:,}", *(_shown(column[at]) for column in (lows, medians, highs)))
        for at in range(count)
        if bounds[at + 1] > bounds[at]
    ]
    return data_table(caption, ("row ids", "smallest", "median", "largest"), rows)


def _shown(value: float) -> str:
    return plain(float(f"{value:.3g}")) if np.isfinite(value) else "none"
