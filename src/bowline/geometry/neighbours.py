"""Compares rows with all rows of their table: whether they decode to themselves, and which row is nearest by cosine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.geometry.table_checks import Array, Floats, Indices, Table, floats, indices
from bowline.geometry.table_source import RowBlock, TableSource, as_source, row_blocks
from bowline.geometry.usable_rows import Rows

__all__ = [
    "ComparedRows",
    "choose_queries",
    "compare_with_all",
    "median_nearest_cosine",
    "nearest_rows",
    "self_decoding_failures",
    "self_decoding_rate",
]

SCORE_ENTRIES = 1 << 22
"""Scores of queries against rows that are held at a time (16 MiB)."""
QUERY_ENTRIES = 1 << 22
"""Entries of the queries that are held at a time (16 MiB in float32, 32 MiB in float64)."""
NEAR = 1e-4
"""Scores in float32 that are lower than a row's own by more than this share need no decision in float64."""
ROUNDING = 8 * float(np.finfo(np.float64).eps)
OWN = -4.0
"""Stands for the cosine of a row with itself: below every cosine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRows:
    """Each of some rows compared with all rows of the table, in the order of the queries.

    compared: whether the query is a usable row that is not zero. Only for these rows do the others mean something.
    failed: another row scores more with the query than the query itself does.
    nearest, cosines: the other row with the largest cosine, and that cosine; -1 and NaN if there is no other row.
    """

    compared: npt.NDArray[np.bool_]
    failed: npt.NDArray[np.bool_]
    nearest: Indices
    cosines: Floats


def self_decoding_failures(table: Table | TableSource | Rows, queries: npt.ArrayLike | None = None) -> Indices:
    """The rows i with argmax_j e_i . e_j != i, ascending: tokens whose own embedding decodes to another token.

    `queries` are the rows to check (indices into `table`; all of them when None); each is compared with every row of
    the table. A tie counts as decoding to itself, so an exact duplicate is not a failure: i fails when some j has
    e_i . (e_j - e_i) > 0, up to the rounding of float64. The best j of each block of rows is found in float32 and that
    inequality is decided in float64. Rows of zeros or with a NaN or an infinity are not checked.

    Example:
        >>> self_decoding_failures(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        array([0])
    """
    asked, found = _distinct(table, queries)
    return asked[found.failed]


def self_decoding_rate(table: Table | TableSource | Rows, queries: npt.ArrayLike | None = None) -> float | None:
    """The share of the rows i with argmax_j e_i . e_j = i, in [0, 1].

    Ties, `queries` and unchecked rows are handled as in `self_decoding_failures`. O(V^2 D) for a whole table, in
    blocks. None when no row is checked.

    Example:
        >>> self_decoding_rate(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        0.75
    """
    found = _distinct(table, queries)[1]
    checked = int(found.compared.sum())
    return 1 - int(found.failed.sum()) / checked if checked else None


def nearest_rows(table: Table | TableSource | Rows, queries: npt.ArrayLike | None = None) -> tuple[Indices, Floats]:
    """For each query row i: the row j != i with the largest cos(e_i, e_j), and that cosine, in [-1, 1].

    `queries` are indices into `table`, all rows when None; e.g. `self_decoding_failures(table)`. Returns two arrays of
    their length; -1 and NaN where a cosine is not defined (a row of zeros, one with a NaN or an infinity, or no other
    row). Float32: cosines closer than about 1e-6 are not distinguished.

    Example:
        >>> neighbours, cosines = nearest_rows(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), [0, 1])
        >>> neighbours, np.round(cosines, 6)
        (array([2, 2]), array([0.6, 0.8]))
    """
    source = _source(table)
    found = compare_with_all(source, indices(queries, source.shape[0]))
    return found.nearest, found.cosines


def median_nearest_cosine(table: Table | TableSource | Rows, queries: npt.ArrayLike | None = None) -> float | None:
    """The median over the rows i of max_{j != i} cos(e_i, e_j), in [-1, 1].

    The closeness of a typical token's nearest neighbour. `queries` as in `nearest_rows`; rows without a cosine are left
    out. None when none remains.

    Example:
        >>> round(median_nearest_cosine(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]])), 6)
        0.8
    """
    cosines = nearest_rows(table, queries)[1]
    cosines = cosines[~np.isnan(cosines)]
    return float(np.median(cosines)) if cosines.size else None


def choose_queries(source: TableSource, count: int, seed: int) -> Indices:
    """A uniform sample of `count` rows that are usable and not zero, ascending; all row numbers of a smaller table."""
    rows = source.shape[0]
    if rows <= count:
        return np.arange(rows)
    order = np.random.default_rng(seed).permutation(rows)
    chosen: list[Indices] = []
    missing, start = count, 0
    while missing and start < rows:
        drawn = order[start : start + max(missing, count // 4)]
        start += drawn.size
        ascending = np.sort(drawn)
        directed = _read(source, ascending).with_direction().places
        chosen.append(drawn[np.isin(drawn, ascending[directed])][:missing])
        missing -= chosen[-1].size
    return np.sort(np.concatenate(chosen))


def compare_with_all(
    source: TableSource, queries: Indices, visit: Callable[[RowBlock], None] | None = None
) -> ComparedRows:
    """Compare each query with every row of the table, which is read once for each `QUERY_ENTRIES` entries of queries.

    Memory does not grow with the table. `visit` is called once with each block of rows.
    """
    count, columns = queries.size, source.shape[1]
    found = ComparedRows(
        compared=np.zeros(count, np.bool_),
        failed=np.zeros(count, np.bool_),
        nearest=np.full(count, -1, np.int64),
        cosines=np.full(count, np.nan),
    )
    step = max(1, min(SCORE_ENTRIES, QUERY_ENTRIES // max(1, columns)))
    for start in range(0, count, step):
        part = slice(start, start + step)
        _compare_some(source, queries[part], found, start, visit if start == 0 else None)
    if not count and visit is not None:
        for block in row_blocks(source):
            visit(block)
    return found


def _compare_some(
    source: TableSource, queries: Indices, found: ComparedRows, first: int, visit: Callable[[RowBlock], None] | None
) -> None:
    distinct, at = np.unique(queries, return_inverse=True)
    read = _read(source, distinct)
    own = read.with_direction()
    numbers = distinct[own.places]
    units, count = own.units(), numbers.size
    nearest, cosines = np.full(count, -1, np.int64), np.full(count, -np.inf)
    failed = np.zeros(count, np.bool_)
    most = max(1, SCORE_ENTRIES // max(1, count))
    scores: Array = np.empty(0, np.float32)
    for block in row_blocks(source, most):
        if visit is not None:
            visit(block)
        rows = block.with_direction()
        if not count or not rows.places.size:
            continue
        if scores.shape != (count, rows.places.size):
            scores = np.empty((count, rows.places.size), np.float32)
        np.matmul(units, rows.units().T, out=scores)
        mine, theirs = np.intersect1d(numbers, rows.places, assume_unique=True, return_indices=True)[1:]
        scores[mine, theirs] = OWN
        best = scores.argmax(axis=1)
        values = scores[np.arange(count), best]
        closer = (values > cosines) & (values >= -2.0)
        nearest[closer], cosines[closer] = rows.places[best[closer]], values[closer]
        _mark_failures(failed, own, rows, scores)
    compared = np.zeros(distinct.size, np.bool_)
    compared[own.places] = True
    slots = np.zeros(distinct.size, np.int64)
    slots[own.places] = np.arange(count)
    into = first + np.flatnonzero(compared[at])
    where = slots[at[compared[at]]]
    found.compared[into] = True
    found.failed[into] = failed[where]
    found.nearest[into] = nearest[where]
    found.cosines[into] = np.where(nearest[where] >= 0, np.clip(cosines[where], -1.0, 1.0), np.nan)


@np.errstate(over="ignore", under="ignore", invalid="ignore")  # a row of 1e-300 beside one of 1e150
def _mark_failures(failed: npt.NDArray[np.bool_], own: RowBlock, rows: RowBlock, scores: Array) -> None:
    """Mark the queries with which the best row of this block scores more than they do; `scores` are overwritten."""
    longest = float(rows.norms.max())
    open_queries = np.flatnonzero(~failed & (own.norms <= longest * (1 + NEAR)))  # e_i . e_j <= ||e_i|| ||e_j||
    if not open_queries.size:
        return
    if open_queries.size < len(scores):
        scores = scores[open_queries]
    scores *= (rows.norms / longest).astype(np.float32)
    best = scores.argmax(axis=1)
    reached = scores[np.arange(best.size), best].astype(np.float64) * longest
    near = reached >= own.norms[open_queries] * (1 - NEAR)
    best, open_queries = best[near], open_queries[near]
    # Powers of two are exact, and own values of about 1 keep the products in range.
    mine = own.wide[open_queries]
    other = np.ldexp(rows.wide[best], rows.exponents[best] - own.exponents[open_queries])
    gain = np.vecdot(mine, other - mine)
    rounding = ROUNDING * np.linalg.norm(mine, axis=1) * np.linalg.norm(other, axis=1)
    failed[open_queries[gain > rounding]] = True


def _read(source: TableSource, chosen: Indices) -> RowBlock:
    """The usable rows among these; `places` are positions in `chosen`."""
    return RowBlock(0, floats(source.take(chosen)))


def _distinct(table: Table | TableSource | Rows, queries: npt.ArrayLike | None) -> tuple[Indices, ComparedRows]:
    source = _source(table)
    asked = np.unique(indices(queries, source.shape[0]))
    return asked, compare_with_all(source, asked)


def _source(table: Table | TableSource | Rows) -> TableSource:
    return table.source if isinstance(table, Rows) else as_source(table)
