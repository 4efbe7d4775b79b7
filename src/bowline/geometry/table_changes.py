"""Measures how far each row of one table is from the same row of another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry.table_checks import Floats, Table, indices
from bowline.geometry.table_source import TableSource, as_source

__all__ = ["RowChanges", "row_changes"]

ENTRIES_AT_ONCE = 1 << 20
LARGEST_RELATIVE = 1e300
"""Larger quotients, which only float64 has, are cut, so that sums and percents of them are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """The change of each row from a to b, in the order of the pairs.

    distance: ||b - a||; NaN if a value of either row is NaN or infinite.
    relative: ||b - a|| / ||a||, at most 1e300; infinite from a row of zeros to another, 0 between two rows of zeros.
    cosine: cos(a, b), in [-1, 1]; NaN if either row is zero or not finite.
    same: whether the rows are equal, value by value; a NaN equals a NaN.
    """

    distance: Floats
    relative: Floats
    cosine: Floats
    same: npt.NDArray[np.bool_]


def row_changes(
    before: Table | TableSource,
    after: Table | TableSource,
    *,
    before_rows: npt.ArrayLike | None = None,
    after_rows: npt.ArrayLike | None = None,
) -> RowChanges:
    """The change of each row of `before` (V, D) to its partner in `after` (W, D), computed in float64 in blocks.

    Rows with the same number are partners, up to the length of the shorter table, unless `before_rows` and
    `after_rows` (of one length) list the pairs.

    Raises:
        UsageError: the tables have rows of different lengths, or the pairs do not fit them.

    Example:
        >>> changes = row_changes(np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 1.0]]))
        >>> changes.distance, changes.cosine, changes.same
        (array([0.        , 1.41421356]), array([1., 0.]), array([ True, False]))
    """
    left, right = as_source(before), as_source(after)
    if left.shape[1] != right.shape[1]:
        raise UsageError(
            f"rows of {left.shape[1]} and of {right.shape[1]} values cannot be compared",
            help="compare tables with one hidden size",
        )
    if (before_rows is None) != (after_rows is None):
        raise UsageError("before_rows and after_rows list pairs together", help="give both or neither")
    if before_rows is None:
        common = min(left.shape[0], right.shape[0])
        first = second = np.arange(common)
    else:
        first, second = indices(before_rows, left.shape[0]), indices(after_rows, right.shape[0])
        if first.size != second.size:
            raise UsageError(
                f"{first.size} rows of the one table and {second.size} of the other are not pairs",
                help="list one row of `after` for each of `before`",
            )
    changes = RowChanges(
        distance=np.empty(first.size),
        relative=np.empty(first.size),
        cosine=np.empty(first.size),
        same=np.empty(first.size, np.bool_),
    )
    step = max(1, ENTRIES_AT_ONCE // max(1, left.shape[1]))
    for start in range(0, first.size, step):
        part = slice(start, start + step)
        _measure(_read(left, first[part]), _read(right, second[part]), changes, part)
    return changes


def _read(source: TableSource, rows: npt.NDArray[np.int64]) -> Floats:
    """The rows in this order, in float64."""
    if rows.size and rows[-1] - rows[0] + 1 == rows.size and (np.diff(rows) == 1).all():
        return source.rows(int(rows[0]), int(rows[-1]) + 1).astype(np.float64)
    distinct, at = np.unique(rows, return_inverse=True)
    found: Floats = source.take(distinct).astype(np.float64)[at]
    return found


def _measure(a: Floats, b: Floats, changes: RowChanges, part: slice) -> None:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        changes.same[part] = ((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=1)
        distance, before, after = _norms(b - a), _norms(a), _norms(b)
        finite = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
        changes.distance[part] = np.where(finite, distance, np.nan)
        relative = np.where(distance == 0, 0.0, distance / before)
        cosine = np.vecdot(a / before[:, None], b / after[:, None])
        beyond = finite & (before > 0) & ~(np.isfinite(relative) & np.isfinite(before + after))
        relative[beyond], cosine[beyond] = _measure_beyond(a[beyond], b[beyond])
        relative = np.where(before > 0, np.minimum(relative, LARGEST_RELATIVE), relative)
        changes.relative[part] = np.where(finite, relative, np.nan)
        defined = finite & (before > 0) & (after > 0)
        changes.cosine[part] = np.where(defined, np.clip(cosine, -1.0, 1.0), np.nan)


def _measure_beyond(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The relative change and the cosine of rows whose norms, distances or quotients overflow float64."""
    largest = [np.abs(one).max(axis=1, keepdims=True) for one in (a, b)]
    exponents = [np.frexp(one)[1] for one in largest]
    common = np.maximum(*exponents)
    units = [np.ldexp(one, -exponent) for one, exponent in zip((a, b), exponents, strict=True)]
    norms = [_norms(one) for one in units]
    distance = _norms(np.ldexp(b, -common) - np.ldexp(a, -common))
    relative = np.ldexp(distance / norms[0], (common - exponents[0])[:, 0])
    cosine = np.vecdot(*units) / (norms[0] * norms[1])
    return relative, cosine


def _norms(rows: Floats) -> Floats:
    """Euclidean norms; rows are scaled first, so that no square overflows or vanishes."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    scaled = rows / scale[:, None]
    norms: Floats = scale * np.sqrt(np.vecdot(scaled, scaled))
    return norms
