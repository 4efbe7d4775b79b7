"""Computes all diagnostics of one table, or of a sample of its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bowline.errors import UsageError
from bowline.geometry.cosines import mean_cosine, mean_squared_cosine, welch_bound
from bowline.geometry.neighbours import median_nearest_cosine, self_decoding_rate
from bowline.geometry.norms import Quantiles, row_norm_quantiles
from bowline.geometry.spectrum import (
    effective_rank,
    frame_ratio,
    identity_bound,
    identity_distance,
    isoscore,
    isotropy,
    participation_ratio,
    tight_frame_distance,
)
from bowline.geometry.table_checks import Indices, Table
from bowline.geometry.usable_rows import Rows

__all__ = ["GeometryReport", "describe", "sample_rows"]

SPECTRUM_ROWS = 2
"""A sample shows the spectrum of a table if it has at least this many rows for each dimension."""
QUERY_PRODUCTS = 6_000_000_000
"""Multiplications that `describe` spends on scores: 512 queries against a table of 30522 x 384."""
LEAST_QUERIES = 256
"""The least number of rows that `describe` queries, in a table of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryReport:
    """Every diagnostic of one table, and what it was computed from.

    rows, hidden_size: V and D of the table.
    sampled_rows: the number of rows in the sample; None if all rows were used and the report is exact.
    left_out_rows, zero_rows: the used rows that have a NaN or an infinity, and those that are zero.
    queried_rows: a uniform sample of the used rows, each compared with all of them, for `self_decoding_rate`
        and `median_nearest_cosine`.

    In a report on a sample, `self_decoding_rate` is the rate among the sampled rows and `median_nearest_cosine` that
    within the sample: fewer rows compete, so the table's own rate is lower and its own cosine higher. Norms are the
    sample's. Means over pairs, `isoscore`, and what follows from the participation ratio, are estimates for the V rows
    of the table. `isotropy` and `effective_rank` are the sample's, and None below 2 rows for each dimension: at 2 a
    Gaussian table already reads 7% low in effective rank.

    Example:
        >>> report = describe(np.eye(4))
        >>> report.sampled_rows, report.participation_ratio, report.as_dict()["row_norms"]["p50"]
        (None, 4.0, 1.0)
    """

    rows: int
    hidden_size: int
    sampled_rows: int | None
    left_out_rows: int
    zero_rows: int
    row_norms: Quantiles | None
    mean_cosine: float | None
    mean_squared_cosine: float | None
    welch_bound: float | None
    isoscore: float | None
    isotropy: float | None
    effective_rank: float | None
    participation_ratio: float | None
    frame_ratio: float | None
    tight_frame_distance: float | None
    identity_distance: float | None
    identity_bound: float | None
    queried_rows: int
    self_decoding_rate: float | None
    median_nearest_cosine: float | None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dicts, numbers and None, in field order, ready for JSON."""
        return asdict(self)


def sample_rows(rows: int, hidden_size: int, budget_bytes: int = 32 << 20, seed: int = 0) -> Indices | None:
    """Choose rows of a (rows, hidden_size) table that fit `budget_bytes` as float32.

    A uniform sample without replacement, ascending, the same for the same seed. None when the whole table fits. At
    least two rows, so that there is a pair.

    Example:
        >>> sample_rows(1000, 64) is None
        True
        >>> sample_rows(128256, 8192).size
        1024
    """
    for name, value in (("rows", rows), ("hidden_size", hidden_size), ("budget_bytes", budget_bytes)):
        if value < 0:
            raise UsageError(f"{name}: expected a count, got {value}", help=f"pass {name} of 0 or more")
    fitting = max(2, budget_bytes // max(1, 4 * hidden_size))
    if rows <= fitting:
        return None
    chosen = np.random.default_rng(seed).choice(rows, size=fitting, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)


def describe(table: Table, *, rows: int | None = None, seed: int = 0) -> GeometryReport:
    """Compute every diagnostic of a table, or of a sample of its rows.

    `table` (V, D) is the whole table, or the rows that `sample_rows` chose from a table of `rows` rows (default: V,
    the whole). `seed` draws the rows whose scores against all others are computed: as many as 6e9 multiplications
    allow, and at least 256. See `GeometryReport` for the meaning of figures of a sample. Raises `UsageError` if `rows`
    is less than V.

    Example:
        >>> table = np.random.default_rng(0).normal(size=(2000, 16))
        >>> chosen = sample_rows(2000, 16, budget_bytes=64000)
        >>> report = describe(table[chosen], rows=2000)
        >>> report.rows, report.sampled_rows, round(report.participation_ratio)
        (2000, 1000, 16)
    """
    held = Rows(table, total=rows)
    sampled = held.stored < held.stored_total
    shows_spectrum = not sampled or held.count >= SPECTRUM_ROWS * held.hidden_size
    queries = _queries(held, seed)
    return GeometryReport(
        rows=held.stored_total,
        hidden_size=held.hidden_size,
        sampled_rows=held.stored if sampled else None,
        left_out_rows=held.stored - held.count,
        zero_rows=held.count - held.nonzero.size,
        row_norms=row_norm_quantiles(held),
        mean_cosine=mean_cosine(held),
        mean_squared_cosine=mean_squared_cosine(held),
        welch_bound=welch_bound(held.in_table(held.nonzero.size), held.hidden_size),
        isoscore=isoscore(held),
        isotropy=isotropy(held) if shows_spectrum else None,
        effective_rank=effective_rank(held) if shows_spectrum else None,
        participation_ratio=participation_ratio(held),
        frame_ratio=frame_ratio(held),
        tight_frame_distance=tight_frame_distance(held),
        identity_distance=identity_distance(held),
        identity_bound=identity_bound(held.total, held.hidden_size),
        queried_rows=queries.size,
        self_decoding_rate=self_decoding_rate(held, queries),
        median_nearest_cosine=median_nearest_cosine(held, queries),
    )


def _queries(rows: Rows, seed: int) -> Indices:
    affordable = max(LEAST_QUERIES, QUERY_PRODUCTS // max(1, rows.count * rows.hidden_size))
    directed = rows.given(rows.nonzero)
    if directed.size <= affordable:
        return directed
    return np.sort(np.random.default_rng(seed).choice(directed, size=affordable, replace=False, shuffle=False))
