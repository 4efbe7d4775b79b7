"""Reads chosen rows of a vocabulary table, and compares their directions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["Ids", "held", "mean_cosine", "take", "unit"]

MOST_SAMPLED = 1 << 22
"""Elements of a table that are held in memory at once: 2048 rows of 2048, fewer rows if they are longer."""

Ids = npt.NDArray[np.int64]


def held(tensor: StoredTensor, rows: int) -> int:
    """`rows`, or the number of rows that may be held in memory at once if that is smaller."""
    return max(2, min(rows, MOST_SAMPLED // max(1, prod(tensor.shape[1:]))))


def take(checkpoint: Checkpoint, tensor: StoredTensor, rows: Sequence[int] | Ids) -> npt.NDArray[np.float32]:
    """The chosen rows, with one read for each run of consecutive rows."""
    taken = np.empty((len(rows), tensor.shape[1]), np.float32)
    at = 0
    while at < len(rows):
        end = at + 1
        while end < len(rows) and rows[end] == rows[end - 1] + 1:
            end += 1
        taken[at:end] = checkpoint.rows(tensor.name, int(rows[at]), int(rows[end - 1]) + 1)
        at = end
    return taken


def unit(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The rows, each divided by its length."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = rows / np.maximum(length, np.finfo(np.float32).tiny)
    return unit


def mean_cosine(unit: npt.NDArray[np.float32]) -> float:
    """The mean cosine of all pairs of rows of length 1."""
    count = len(unit)
    total = unit.sum(axis=0, dtype=np.float64)
    return float((total @ total - count) / (count * (count - 1))) if count > 1 else 0.0
