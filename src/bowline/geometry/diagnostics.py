"""Computes all diagnostics of one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bowline.errors import UsageError
from bowline.geometry.cosines import mean_cosine, mean_squared_cosine, welch_bound
from bowline.geometry.neighbours import ComparedRows, choose_queries, compare_with_all
from bowline.geometry.norms import Quantiles, quantiles
from bowline.geometry.spectrum import (
    effective_rank,
    frame_ratio,
    identity_bound,
    identity_distance,
    isoscore,
    isotropy,
    participation_ratio,
    shows_spectrum,
    tight_frame_distance,
)
from bowline.geometry.standard_errors import error_of_median, error_of_share, sampling_errors
from bowline.geometry.table_checks import Array, Floats, Indices, Table
from bowline.geometry.table_source import RowBlock, TableSource, as_source
from bowline.geometry.usable_rows import Rows

__all__ = ["GeometryReport", "describe", "sample_rows", "spectrum_rows"]

WHOLE_TABLE_BYTES = 64 << 20
"""Up to this many bytes (as float32), all rows of a table are used for every diagnostic."""
SAMPLE_BYTES = 16 << 20
"""Bytes of the sample of a larger table, from which the diagnostics of its Gram matrix are estimated."""
QUERY_PRODUCTS = 30_000_000_000
"""Multiplications that `describe` spends on scores: 1059 queries against a table of 49152 x 576."""
LEAST_QUERIES = 512
"""The least number of rows that `describe` queries, in a table of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryReport:
    """Every diagnostic of one table, and what it was computed from.

    rows, hidden_size: V and D of the table.
    sampled_rows: the number of rows that the diagnostics of the Gram matrix were estimated from; None if all rows were
        used.
    left_out_rows, zero_rows: the rows that have a NaN or an infinity, and those that are zero.
    queried_rows: the number of rows that were compared with all rows, for `self_decoding_rate` and
        `median_nearest_cosine`: all that are usable and not zero, or a uniform sample of them.
    standard_errors: the standard error of each figure that is an estimate, by its name, or None if all are exact.

    The diagnostics of the Gram matrix are those from `mean_squared_cosine` to `identity_distance`, without the bounds.
    Estimated from a sample, they are estimates for the V rows of the table. `isotropy` and `effective_rank` are None
    below 2 sampled rows for each dimension. Norms, counts and `mean_cosine` are of all rows.

    In a report on a sample that was drawn by the caller, the norms and counts are the sample's, `mean_cosine` is an
    estimate too, and `self_decoding_rate` and `median_nearest_cosine` are None: where only some rows compete, more rows
    decode to themselves and the nearest row is further away.

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
    standard_errors: Mapping[str, float] | None

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


def describe(table: Table | TableSource, *, rows: int | None = None, seed: int = 0) -> GeometryReport:
    """Compute every diagnostic of a table.

    `table` (V, D) is the whole table: an array, which may be memory-mapped, a tensor, or a `TableSource`. Up to 64 MiB
    (as float32) all rows are used. A larger one is read in blocks, in constant memory: the diagnostics of its Gram
    matrix are estimated from the 16 MiB of rows that `sample_rows` chooses. Self-decoding and the nearest cosine
    compare some rows with all rows: as many as 3e10 multiplications allow, and at least 512. `seed` draws both samples.

    With `rows`, `table` is a uniform sample of a table of `rows` rows. See `GeometryReport` for the meaning of its
    figures. Raises `UsageError` if `rows` is less than V.

    Example:
        >>> table = np.random.default_rng(0).normal(size=(2000, 16))
        >>> chosen = sample_rows(2000, 16, budget_bytes=64000)
        >>> report = describe(table[chosen], rows=2000)
        >>> report.rows, report.sampled_rows, round(report.participation_ratio)
        (2000, 1000, 16)
    """
    source = as_source(table)
    stored, hidden_size = source.shape
    chosen = spectrum_rows(stored, hidden_size, seed) if rows is None else None
    if chosen is None:
        held = Rows(table, total=rows)
        lengths = _Lengths(
            seen=held.stored,
            norms=np.ldexp(held.norms, held.exponent),
            directed=held.nonzero.size,
            mean_cosine=mean_cosine(held),
        )
        if held.stored < held.stored_total:
            return _report(held, lengths, None, sampling_errors(held))
        queries = choose_queries(held.source, _affordable(*held.source.shape), seed)
        return _report(held, lengths, compare_with_all(held.source, queries), {})
    totals = _Totals(source, chosen)
    compared = compare_with_all(source, choose_queries(source, _affordable(*source.shape), seed), totals.add)
    held = Rows(totals.sample, total=stored)
    errors = {name: error for name, error in sampling_errors(held).items() if name != "mean_cosine"}
    return _report(held, totals.lengths(), compared, errors)


def spectrum_rows(rows: int, hidden_size: int, seed: int = 0) -> Indices | None:
    """The rows from which `describe` estimates the diagnostics of the Gram matrix; None when it uses all rows.

    Example:
        >>> spectrum_rows(30522, 384) is None, spectrum_rows(49152, 576).size
        (True, 7281)
    """
    whole = sample_rows(rows, hidden_size, WHOLE_TABLE_BYTES) is None
    return None if whole else sample_rows(rows, hidden_size, SAMPLE_BYTES, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """The norms of the usable ones of `seen` rows, how many are not zero, and the mean cosine of these."""

    seen: int
    norms: Floats
    directed: int
    mean_cosine: float | None


class _Totals:
    """Collects the norm of each row, the sum of the rows scaled to length 1, and the sampled rows, in one pass."""

    def __init__(self, source: TableSource, chosen: Indices) -> None:
        self._norms: Floats = np.full(source.shape[0], np.nan)
        self.sample: Array = np.empty((0, source.shape[1]))
        self._chosen = chosen
        self._sum_of_units: Floats = np.zeros(source.shape[1])

    def add(self, block: RowBlock) -> None:
        if not self.sample.size:
            self.sample = np.full((self._chosen.size, block.values.shape[1]), np.nan, block.values.dtype)
        self._norms[block.places] = block.norms
        directed = block.with_direction()
        self._sum_of_units += (1.0 / directed.scaled_norms) @ directed.wide
        here, there = np.intersect1d(block.places, self._chosen, assume_unique=True, return_indices=True)[1:]
        self.sample[there] = block.values[here]

    def lengths(self) -> _Lengths:
        norms = self._norms[~np.isnan(self._norms)]
        count = int((norms > 0).sum())
        pairs = float(self._sum_of_units @ self._sum_of_units) - count
        return _Lengths(
            seen=self._norms.size,
            norms=norms,
            directed=count,
            mean_cosine=min(1.0, pairs / (count * (count - 1))) if count > 1 else None,
        )


def _report(held: Rows, lengths: _Lengths, compared: ComparedRows | None, errors: dict[str, float]) -> GeometryReport:
    """The report, with the diagnostics of the Gram matrix from `held`."""
    rate = nearest = None
    queried = 0
    if compared is not None:
        cosines = compared.cosines[~np.isnan(compared.cosines)]
        queried, failed = int(compared.compared.sum()), int(compared.failed.sum())
        rate = 1 - failed / queried if queried else None
        nearest = float(np.median(cosines)) if cosines.size else None
        if queried < lengths.directed:
            errors["self_decoding_rate"] = error_of_share(queried - failed, queried, lengths.directed)
            errors["median_nearest_cosine"] = error_of_median(cosines, lengths.directed)

    def in_table(count: int) -> int:
        return round(held.stored_total * count / lengths.seen) if lengths.seen else 0

    return GeometryReport(
        rows=held.stored_total,
        hidden_size=held.hidden_size,
        sampled_rows=held.stored if held.stored < held.stored_total else None,
        left_out_rows=lengths.seen - lengths.norms.size,
        zero_rows=lengths.norms.size - lengths.directed,
        row_norms=quantiles(lengths.norms),
        mean_cosine=lengths.mean_cosine,
        mean_squared_cosine=mean_squared_cosine(held),
        welch_bound=welch_bound(in_table(lengths.directed), held.hidden_size),
        isoscore=isoscore(held),
        isotropy=isotropy(held) if shows_spectrum(held) else None,
        effective_rank=effective_rank(held) if shows_spectrum(held) else None,
        participation_ratio=participation_ratio(held),
        frame_ratio=frame_ratio(held),
        tight_frame_distance=tight_frame_distance(held),
        identity_distance=identity_distance(held),
        identity_bound=identity_bound(in_table(lengths.norms.size), held.hidden_size),
        queried_rows=queried,
        self_decoding_rate=rate,
        median_nearest_cosine=nearest,
        standard_errors=errors or None,
    )


def _affordable(rows: int, hidden_size: int) -> int:
    """The number of rows that `describe` queries."""
    return max(LEAST_QUERIES, QUERY_PRODUCTS // max(1, rows * hidden_size))
