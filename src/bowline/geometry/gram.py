"""Gram matrices and the sums over their entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bowline.geometry.table_checks import Array

__all__ = ["FLOAT64_GRAM", "sum_of_grams", "sum_of_squares", "without_diagonal"]

FLOAT64_GRAM = 1024
"""The largest side of a Gram matrix that is summed in float64."""


def sum_of_grams(parts: Iterator[Array], side: int) -> Array:
    """The sum of B^T B over the parts B (n, side): float64 up to `FLOAT64_GRAM`, float32 above."""
    dtype: type[np.floating[Any]] = np.float64 if side <= FLOAT64_GRAM else np.float32
    gram: Array = np.zeros((side, side), dtype=dtype)
    for part in parts:
        block: Array = part.astype(dtype, copy=False)
        gram += block.T @ block
    return gram


def without_diagonal(matrix: Array) -> Array:
    """A copy with zeros on the diagonal."""
    pairs = matrix.copy()
    np.fill_diagonal(pairs, 0.0)
    return pairs


def sum_of_squares(matrix: Array) -> float:
    """||M||_F^2, in float64."""
    return float(np.square(matrix, dtype=np.float64).sum())
