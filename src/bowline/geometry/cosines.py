"""The mean cosine and the mean squared cosine over pairs of rows, and the lower bound of the latter."""

from __future__ import annotations

import numpy as np

from bowline.geometry.gram import sum_of_squares, without_diagonal
from bowline.geometry.table_checks import Table
from bowline.geometry.usable_rows import Rows

__all__ = ["mean_cosine", "mean_squared_cosine", "welch_bound"]


def mean_cosine(table: Table | Rows) -> float | None:
    """The mean of cos(e_i, e_j) over the pairs i != j, in [-1 / (V - 1), 1].

    Exact in O(V D), through the sum of the normalised rows u_i: (||sum_i u_i||^2 - V) / (V (V - 1)). Near 1 when the
    rows lie in a narrow cone (Gao et al., "Representation Degeneration Problem", 2019; Ethayarajh, 2019). None for
    fewer than two rows.

    Example:
        >>> mean_cosine(np.array([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))  # pairs: 1, 0, 0
        0.3333333333333333
    """
    rows = Rows.of(table)
    count = rows.nonzero.size
    if count < 2:
        return None
    total = sum((block.sum(axis=0) for _, block in rows.unit_blocks()), start=np.zeros(rows.hidden_size))
    return min(1.0, (float(total @ total) - count) / (count * (count - 1)))


def mean_squared_cosine(table: Table | Rows) -> float | None:
    """The mean of cos(e_i, e_j)^2 over the pairs i != j, in [`welch_bound`, 1].

    Exact in O(V D min(V, D)), through the Gram matrix U^T U of the normalised rows:
    (||U^T U||_F^2 - V) / (V (V - 1)). None for fewer than two rows.

    Example:
        >>> mean_squared_cosine(np.array([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))
        0.3333333333333333
    """
    rows = Rows.of(table)
    count = rows.nonzero.size
    if count < 2:
        return None
    gram = rows.unit_gram()
    pairs = sum_of_squares(without_diagonal(gram)) if rows.wide else max(0.0, sum_of_squares(gram) - count)
    return min(1.0, pairs / (count * (count - 1)))


def welch_bound(rows: int, hidden_size: int) -> float | None:
    """The lower bound of the mean squared cosine of V rows in D dimensions: max(0, V - D) / (D (V - 1)).

    Reached exactly by rows of equal length that form a tight frame (Welch, "Lower Bounds on the Maximum Cross
    Correlation of Signals", 1974). None for fewer than two rows.

    Example:
        >>> round(welch_bound(30522, 384), 5)
        0.00257
    """
    if rows < 2 or hidden_size < 1:
        return None
    return max(0, rows - hidden_size) / (hidden_size * (rows - 1))
