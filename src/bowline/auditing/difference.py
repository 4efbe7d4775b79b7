"""Describes how two tables that should be equal differ, and what the difference looks like."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.row_scan import PairScan, rounded
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["Cause", "TableDifference", "explain_difference"]

ROWS_NAMED = 8
SAMPLE_ROWS = 256
SAMPLE_COLUMNS = 1024
FEW = 0.1
"""Up to this share, the differing rows count as a few rows, not as the whole table."""
LARGEST_RANK = 64
SPACING = {"F64": 2.0**-52, "F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
"""Distance between neighbouring numbers at 1.0."""


class Cause(StrEnum):
    """The likely cause of a difference between two tables."""

    ADDED_TOKENS = "added tokens"
    LOW_RANK = "a merged low-rank delta"
    ROUNDING = "noise from a cast"
    SOME_ROWS = "some rows"
    ALL_ROWS = "all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """The number of rows that differ, the first of them, the largest difference, and its likely cause.

    `rank` is the numerical rank of a low-rank delta; `dtype` is the dtype that a cast went through.
    """

    rows_differing: int
    some_rows: tuple[int, ...]
    max_abs_difference: float
    cause: Cause
    rank: int | None = None
    dtype: str | None = None

    @property
    def has_pattern(self) -> bool:
        """Whether the cause says more than the number of rows does."""
        return self.cause not in (Cause.SOME_ROWS, Cause.ALL_ROWS)

    @property
    def extent(self) -> str:
        """The largest difference in words; it is unknown (NaN) for codes whose scale is unknown."""
        unknown = isnan(self.max_abs_difference)
        return "by an unknown amount" if unknown else f"by at most {self.max_abs_difference:.3g}"

    def __str__(self) -> str:
        detail = f" of rank {self.rank}" if self.rank else f" through {self.dtype}" if self.dtype else ""
        return f"{self.cause.value}{detail}"


def explain_difference(checkpoint: Checkpoint, pair: PairScan, source: StoredTensor) -> TableDifference | None:
    """Describe the difference of a scanned pair of tables; `None` when no row differs.

    The singular values of a sample of rows separate a low-rank delta from noise: few of them are above the level that
    the rounding of the storage dtype causes. The cause is a guess, so reports say "looks like".
    """
    where = np.flatnonzero(pair.differs)
    if not len(where):
        return None
    rows = len(pair.differs)
    cause, rank, dtype = Cause.ALL_ROWS if len(where) > (1 - FEW) * rows else Cause.SOME_ROWS, None, None
    if where[0] > 0 and len(where) <= FEW * rows and where[-1] == rows - 1 and where[-1] - where[0] + 1 == len(where):
        cause = Cause.ADDED_TOKENS
    elif len(source.shape) == 2:
        target_rows, source_rows = _samples(checkpoint, pair.tensor, source, where)
        dtype = _cast_through(target_rows, source_rows)
        rank = None if dtype else _low_rank(target_rows, source_rows, source.dtype)
        cause = Cause.ROUNDING if dtype else Cause.LOW_RANK if rank else cause
    return TableDifference(
        rows_differing=len(where),
        some_rows=tuple(int(row) for row in where[:ROWS_NAMED]),
        max_abs_difference=pair.max_abs_difference,
        cause=cause,
        rank=rank,
        dtype=dtype,
    )


Rows = npt.NDArray[Any]


def _samples(
    checkpoint: Checkpoint, target: StoredTensor, source: StoredTensor, where: npt.NDArray[np.int64]
) -> tuple[Rows, Rows]:
    chosen = where[np.linspace(0, len(where) - 1, min(SAMPLE_ROWS, len(where))).astype(np.int64)]
    left, right = (
        np.stack(
            [  # a copy of the used columns: a view would keep the whole row in memory
                checkpoint.rows(tensor.name, row, row + 1)[0, :SAMPLE_COLUMNS].astype(np.float64)
                for row in map(int, chosen)
            ]
        )
        for tensor in (target, source)
    )
    finite = np.isfinite(left).all(axis=1) & np.isfinite(right).all(axis=1)
    return left[finite], right[finite]


def _cast_through(target: Rows, source: Rows) -> str | None:
    """The dtype, F16 or BF16, in which one table is the rounded values of the other; `None` if neither is."""
    for dtype in ("F16", "BF16"):
        if target.size and (
            np.array_equal(rounded(target, dtype), target) and np.array_equal(rounded(source, dtype), target)
        ):
            return dtype
        if target.size and (
            np.array_equal(rounded(source, dtype), source) and np.array_equal(rounded(target, dtype), source)
        ):
            return dtype
    return None


def _low_rank(target: Rows, source: Rows, dtype: str) -> int | None:
    rows, columns = target.shape
    if min(rows, columns) < 8:
        return None
    delta = target - source
    if not np.isfinite(delta).all():  # two numbers at opposite ends of float64's range
        return None
    singular = np.linalg.svd(delta, compute_uv=False)
    spacing = SPACING.get(dtype, 2.0**-7)
    rounding = spacing / np.sqrt(12.0) * float(np.sqrt(np.mean(target**2)))  # standard deviation of one rounding
    floor = max(2.0 * rounding * (np.sqrt(rows) + np.sqrt(columns)), 1e-6 * float(singular[0]))
    rank = int((singular > floor).sum())
    return rank if 0 < rank <= min(LARGEST_RANK, min(rows, columns) // 4) else None
