"""Values of rows by id: the range of each stretch of ids as a band, its median as a line, and chosen rows as points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bowline.page.elements import Html, element, fragment
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import LEFT, RIGHT, WIDTH, AxisScale, count_label, frame, linear, path, plain
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["change_panel", "norm_panel"]

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
        _stretches("Norms by id", view.norms, 1.0),
        data_table(
            "The shortest and the longest rows",
            ("row", "norm"),
            [(rows.link(row), f"{view.norms[row]:.4g}") for row in extreme],
        ),
    )
    return panel(f"Row norms: {view.label}", _drawing(view.norms, scale, what, "norm ‖e‖", extreme), note, table)


def change_panel(title: str, what: str, relative: Floats, rows: RowList, listed: Sequence[int]) -> Html:
    """The change of each row by its id, in percent of its norm; `listed` are the rows that changed most."""
    finite = relative[np.isfinite(relative)] * 100
    scale = linear(0.0, max(float(finite.max(initial=0.0)) * 1.05, 1e-9))
    changed = int((relative != 0).sum())
    unchanged = relative.size - changed
    note = (
        f"{count_label(changed, 'row')} changed and {unchanged:,} did not. The line is the median of a stretch of ids, "
        "the band its smallest to its largest change."
    )
    return panel(
        title, _drawing(relative * 100, scale, what, "change, % of ‖e‖", []), note, _stretches(what, relative, 100.0)
    )


def _drawing(values: Floats, scale: AxisScale, label: str, y_label: str, points: Sequence[int]) -> Html:
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


def _stretches(caption: str, values: Floats, times: float) -> Html:
    count = max(1, min(TABLED, values.size))
    bounds = np.linspace(0, values.size, count + 1).astype(int)
    lows, medians, highs = _ranges(values * times, count)
    rows = [
        (f"{bounds[at]:,} to {bounds[at + 1] - 1:,}", *(_shown(column[at]) for column in (lows, medians, highs)))
        for at in range(count)
        if bounds[at + 1] > bounds[at]
    ]
    return data_table(caption, ("row ids", "smallest", "median", "largest"), rows)


def _shown(value: float) -> str:
    return plain(float(f"{value:.3g}")) if np.isfinite(value) else "none"
