"""Finds the rows of a table that are closest to given rows by cosine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry.table_checks import Array, Floats, Indices, Table, floats, indices
from bowline.geometry.table_source import RowBlock, TableSource, as_source, row_blocks

__all__ = ["closest_rows"]

SCORES_AT_ONCE = 1 << 23
"""Cosines of queries with rows that are held at a time (32 MiB)."""
QUERIES_AT_ONCE = 1 << 12
OWN = -4.0
"""Stands for the cosine of a row with itself: below every cosine."""


def closest_rows(
    table: Table | TableSource, queries: npt.ArrayLike | None = None, *, count: int = 8
) -> tuple[Indices, Floats]:
    """For each query row i: the `count` rows j != i with the largest cos(e_i, e_j), and these cosines, descending.

    `queries` are indices into `table` (V, D), all rows when None. Returns two arrays (len(queries), count): -1 and NaN
    where a cosine is not defined (a row of zeros, or one with a NaN or an infinity) and beyond the last row. Exact but
    for rounding: every row is compared, in float32, so cosines closer than about 1e-6 are not distinguished.
    O(len(queries) V D), in constant memory beside the result.

    Raises:
        UsageError: `count` is less than 1, or a query is no row of the table.

    Example:
        >>> ids, cosines = closest_rows(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), [0], count=2)
        >>> ids, np.round(cosines, 6)
        (array([[2, 1]]), array([[0.6, 0. ]]))
    """
    if count < 1:
        raise UsageError(f"count: expected 1 or more, got {count}", help="ask for at least one row")
    source = as_source(table)
    asked = indices(queries, source.shape[0])
    ids = np.full((asked.size, count), -1, np.int64)
    cosines = np.full((asked.size, count), np.nan)
    for start in range(0, asked.size, QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        distinct, at = np.unique(asked[part], return_inverse=True)
        found = _closest(source, distinct, count)
        ids[part], cosines[part] = found[0][at], found[1][at]
    return ids, cosines


def _closest(source: TableSource, distinct: Indices, count: int) -> tuple[Indices, Floats]:
    ids = np.full((distinct.size, count), -1, np.int64)
    best = np.full((distinct.size, count), -np.inf, np.float32)
    own = RowBlock(0, floats(source.take(distinct))).with_direction()
    numbers, units = distinct[own.places], own.units()
    kept_ids, kept = ids[own.places], best[own.places]
    opening = 4 * count
    for block in row_blocks(source, max(1, SCORES_AT_ONCE // max(1, numbers.size))):
        rows = block.with_direction()
        if not numbers.size or not rows.places.size:
            continue
        scores = units @ rows.units().T
        mine, theirs = np.intersect1d(numbers, rows.places, assume_unique=True, return_indices=True)[1:]
        scores[mine, theirs] = OWN
        for part in (slice(0, opening), slice(opening, None)):  # the first rows, alone, give the others a bound
            _keep_best(kept_ids, kept, scores[:, part], rows.places[part], bounded=not opening)
        opening = 0
    ids[own.places], best[own.places] = kept_ids, kept
    return ids, np.where(ids >= 0, np.clip(best.astype(np.float64), -1.0, 1.0), np.nan)


def _keep_best(ids: Indices, best: Array, scores: Array, places: Indices, *, bounded: bool) -> None:
    """Merge the scores (queries, rows) of some rows into the best so far. Most scores are below them all, and fall.

    The rows come in ascending order, so a score that only equals the lowest of `count` is not among the best. `bounded`
    says whether the best so far are those of many rows.
    """
    count = best.shape[1]
    full = best[:, -1] > -2.0  # above a row's own
    lowest = np.where(full, np.nextafter(best[:, -1], np.float32(np.inf)), np.float32(-2.0))
    width = scores.shape[1] // (4 * count)
    if width > 1 and not (bounded and full.all()):  # at least `count` scores reach this
        grouped = scores[:, : width * 4 * count].reshape(len(scores), width, 4 * count).max(axis=1)
        lowest = np.maximum(lowest, np.partition(grouped, 3 * count, axis=1)[:, 3 * count])
    at, column = np.nonzero(scores >= lowest[:, None])
    starts = np.searchsorted(at, np.arange(len(scores) + 1))
    gaining = np.flatnonzero(np.diff(starts))
    if not gaining.size:
        return
    slot = count + np.arange(at.size) - starts[at]
    row = np.searchsorted(gaining, at)
    values = np.full((gaining.size, int(slot.max()) + 1), -np.inf, np.float32)
    names = np.full(values.shape, -1, np.int64)
    values[:, :count], names[:, :count] = best[gaining], ids[gaining]
    values[row, slot], names[row, slot] = scores[at, column], places[column]
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]  # of equal cosines, the lower row stays first
    best[gaining] = np.take_along_axis(values, order, axis=1)
    ids[gaining] = np.take_along_axis(names, order, axis=1)
