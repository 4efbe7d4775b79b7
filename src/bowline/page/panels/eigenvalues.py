"""The eigenvalues of EᵀE: how evenly the rows use their directions."""

from __future__ import annotations

import numpy as np

from bowline.page.elements import Html, element
from bowline.page.panels.panel import data_table, panel
from bowline.page.plot_frame import frame, linear, logarithmic, path
from bowline.page.table_view import TableView

__all__ = ["spectrum_panel"]

LEAST = 1e-4
"""Eigenvalues below this share of their mean are not drawn."""
DRAWN = 300
TABLED = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def spectrum_panel(view: TableView) -> Html:
    """The spectrum of a table; a sentence in its place if the rows that were read do not show it."""
    values, title = view.eigenvalues, f"Spectrum: {view.label}"
    if values is None:
        read = f"{view.sampled_rows or view.shape[0]:,} rows of {view.shape[1]:,}"
        return panel(title, None, f"Left out: the {read} that were read do not show it.", None)
    shown = values[values > LEAST]
    y = logarithmic(max(LEAST, float(shown.min())), max(1.0, float(shown.max())))
    x = linear(1, values.size)
    chosen = np.unique(np.geomspace(1, shown.size, DRAWN).astype(int)) - 1
    chosen = np.union1d(chosen, np.linspace(0, shown.size - 1, DRAWN).astype(int))
    line = element("path", d=path([(x.x(at + 1), y.y(shown[at])) for at in chosen.tolist()]), class_="line")
    even = element("path", d=path([(x.x(1), y.y(1.0)), (x.x(values.size), y.y(1.0))]), class_="reference")
    first = 100 * values[0] / values.sum()
    source = f" Estimated from {view.sampled_rows:,} rows." if view.sampled_rows else ""
    note = (
        f"The first direction holds {first:.1f} % of the squared norms. The dashed line is a table that uses all "
        f"directions alike, as EᵀE = c I does.{source}"
    )
    drawing = frame(
        even,
        line,
        label=f"The eigenvalues of the Gram matrix of {view.tensor} in units of their mean, largest first",
        x=x,
        y=y,
        x_label="direction, largest first",
        y_label="eigenvalue / mean",
    )
    rows = [(f"{at:,}", f"{values[at - 1]:.3g}") for at in (*TABLED, values.size) if at <= values.size]
    table = data_table(
        f"Eigenvalues in units of their mean: {view.label}", ("direction", "eigenvalue"), dict(rows).items()
    )
    return panel(title, drawing, note, table)
