"""Compares every row with the others: whether it decodes to itself, and which row is nearest by cosine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bowline.geometry.table_checks import Floats, Indices, Table
from bowline.geometry.usable_rows import Rows

__all__ = ["median_nearest_cosine", "nearest_rows", "self_decoding_failures", "self_decoding_rate"]

SCORE_ENTRIES = 1 << 23
"""Scores of queries against rows that are held at a time (32 MiB)."""


def self_decoding_failures(table: Table | Rows, queries: npt.ArrayLike | None = None) -> Indices:
    """The rows i with argmax_j e_i . e_j != i, ascending: tokens whose own embedding decodes to another token.

    `queries` are the rows to check (indices into `table`; all of them when None); each is compared with every row of
    the table. A tie counts as decoding to itself, so an exact duplicate is not a failure: i fails when some j has
    e_i . (e_j - e_i) > 0. The best j is found in float32 and that inequality is decided in float64. Only rows longer
    than e_i are tried, since e_i . e_j <= ||e_i|| ||e_j||. Rows of zeros or with a NaN or an infinity are not checked.

    Example:
        >>> self_decoding_failures(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        array([0])
    """
    rows = Rows.of(table)
    order = np.argsort(-rows.norms, kind="stable")
    ranked = rows.array[order].astype(np.float32, copy=False)
    rank = np.empty(rows.count, dtype=np.int64)
    rank[order] = np.arange(rows.count)
    failed = []
    for asked in _score_blocks(np.unique(rank[rows.with_direction(queries)]), rows):
        longer = ranked[: int(asked[-1]) + 1]
        own = rows.array[order[asked]].astype(np.float64)
        unit = (own / rows.norms[order[asked], None]).astype(np.float32)
        best = (unit @ longer.T).argmax(axis=1)
        gain = np.einsum("ij,ij->i", own, rows.array[order[best]].astype(np.float64) - own)
        failed.append(order[asked[gain > 0]])
    return rows.given(np.sort(np.concatenate([np.empty(0, dtype=np.int64), *failed])))


def self_decoding_rate(table: Table | Rows, queries: npt.ArrayLike | None = None) -> float | None:
    """The share of the rows i with argmax_j e_i . e_j = i, in [0, 1].

    Ties, `queries` and unchecked rows are handled as in `self_decoding_failures`. O(V^2 D) for a whole table, in
    blocks. None when no row is checked.

    Example:
        >>> self_decoding_rate(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        0.75
    """
    rows = Rows.of(table)
    asked = np.unique(rows.with_direction(queries)).size
    return 1 - self_decoding_failures(rows, queries).size / asked if asked else None


def nearest_rows(table: Table | Rows, queries: npt.ArrayLike | None = None) -> tuple[Indices, Floats]:
    """For each query row i: the row j != i with the largest cos(e_i, e_j), and that cosine, in [-1, 1].

    `queries` are indices into `table`, all rows when None; e.g. `self_decoding_failures(table)`. Returns two arrays of
    their length; -1 and NaN where a cosine is not defined (a row of zeros, one with a NaN or an infinity, or no other
    row). Float32: cosines closer than about 1e-6 are not distinguished.

    Example:
        >>> neighbours, cosines = nearest_rows(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), [0, 1])
        >>> neighbours, np.round(cosines, 6)
        (array([2, 2]), array([0.6, 0.8]))
    """
    rows = Rows.of(table)
    asked = rows.positions(queries)
    neighbours = np.full(asked.size, -1, dtype=np.int64)
    cosines = np.full(asked.size, np.nan)
    if rows.nonzero.size < 2:
        return neighbours, cosines
    unit = np.empty(rows.array.shape, dtype=np.float32)
    for place, block in rows.unit_blocks():
        unit[place] = block
    zeros = np.flatnonzero(rows.norms == 0)
    for places in _score_blocks(np.flatnonzero(rows.have_direction(asked)), rows):
        own, line = asked[places], np.arange(places.size)
        scores = unit[own] @ unit.T
        scores[line, own] = -np.inf
        scores[:, zeros] = -np.inf
        best = scores.argmax(axis=1)
        neighbours[places] = rows.given(best)
        cosines[places] = np.clip(scores[line, best], -1.0, 1.0)
        del scores  # before those of the next block are computed
    return neighbours, cosines


def median_nearest_cosine(table: Table | Rows, queries: npt.ArrayLike | None = None) -> float | None:
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


def _score_blocks(queries: Indices, rows: Rows) -> Iterator[Indices]:
    """Blocks of the queries, small enough for their scores and for float64 copies of the rows themselves."""
    step = max(1, SCORE_ENTRIES // max(1, rows.count, 8 * rows.hidden_size))
    for start in range(0, queries.size, step):
        yield queries[start : start + step]
