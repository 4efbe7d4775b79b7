"""Quantiles of the row norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bowline.geometry.table_checks import Floats, Table
from bowline.geometry.usable_rows import Rows

__all__ = ["Quantiles", "quantiles", "row_norm_quantiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Minimum, 5%, 50% and 95% quantile, and maximum.

    Example:
        >>> Quantiles(min=0.0, p5=0.1, p50=0.5, p95=0.9, max=1.0).p50
        0.5
    """

    min: float
    p5: float
    p50: float
    p95: float
    max: float


def row_norm_quantiles(table: Table | Rows) -> Quantiles | None:
    """The quantiles of ||e_i|| over the V rows of E (V, D); each in [0, inf).

    A tied row that was never trained stands out by its norm. None without rows.

    Example:
        >>> row_norm_quantiles(np.array([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])).max
        5.0
    """
    rows = Rows.of(table)
    return quantiles(np.ldexp(rows.norms, rows.exponent))


def quantiles(norms: Floats) -> Quantiles | None:
    """The quantiles of these norms; None without any."""
    if not norms.size:
        return None
    values = np.quantile(norms, (0.0, 0.05, 0.5, 0.95, 1.0))
    least, low, middle, high, most = (float(value) for value in values)
    return Quantiles(min=least, p5=low, p50=middle, p95=high, max=most)
