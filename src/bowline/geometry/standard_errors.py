"""The standard errors of diagnostics that are estimated from some of a table's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from bowline.geometry.cosines import mean_cosine, mean_squared_cosine
from bowline.geometry.spectrum import (
    coordinates,
    identity_distance,
    isoscore,
    isotropy,
    isotropy_shortfall,
    log_isotropy,
    log_partition,
    participation_ratio,
    rank_shortfall,
    shows_spectrum,
    tight_frame_distance,
)
from bowline.geometry.table_checks import Array, Floats
from bowline.geometry.usable_rows import Rows

__all__ = ["error_of_median", "error_of_share", "sampling_errors"]


def error_of_share(hits: int, drawn: int, of: int) -> float:
    """The standard error of `hits / drawn` as an estimate for `of` things, from `drawn` of them without replacement.

    sqrt(p (1 - p) / n (1 - n / N)) with p = (hits + 1/2) / (n + 1), so that a share of 0 or 1 has an error too.

    Example:
        >>> round(error_of_share(103, 1000, 50000), 4), error_of_share(3, 10, 10)
        (0.0095, 0.0)
    """
    p = (hits + 0.5) / (drawn + 1)
    return math.sqrt(p * (1 - p) / drawn * _missing(drawn, of))


def error_of_median(values: Floats, of: int) -> float:
    """The standard error of the median of a sample of `of` values, drawn without replacement.

    Half the distance between the order statistics one standard error below and above the middle, sqrt(n) / 2 places
    away for a small sample of many. It assumes no distribution.

    Example:
        >>> round(error_of_median(np.arange(100.0), 10**9), 3), error_of_median(np.arange(100.0), 100)
        (5.0, 0.0)
    """
    count = values.size
    away = 0.5 * math.sqrt(_missing(count, of) / count)
    low, high = np.quantile(values, (max(0.0, 0.5 - away), min(1.0, 0.5 + away)), method="hazen")
    return float(high - low) / 2


def sampling_errors(rows: Rows) -> dict[str, float]:
    """The standard error of each diagnostic of a sample that is defined, by its name; empty for a whole table.

    First-order (the infinitesimal jackknife: Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", 1982):
    a figure changes with the weight of row i by its influence, so its variance is n times that of the influences,
    times 1 - n / V for rows drawn without replacement. Those of the effective rank and of isotropy include the
    error of their corrections: 2 s^2 / r, and a third of the correction. For isotropy the influences take the
    eigenvectors as fixed, so half the difference of the two halves of the sample is added in quadrature.

    Example:
        >>> sampling_errors(Rows(np.eye(3)))
        {}
    """
    if rows.total <= rows.count or rows.nonzero.size < 2:
        return {}
    return {name: error for name, error in _errors(rows) if math.isfinite(error)}


def _errors(rows: Rows) -> Iterator[tuple[str, float]]:
    spread = math.sqrt(rows.count * _missing(rows.count, rows.total))
    yield from _errors_of_cosines(rows)
    ratio = participation_ratio(rows)
    if ratio is not None:
        error = ratio * spread * _relative_spread(rows, rows.gram(), rows.squared_norms, _same)
        yield "participation_ratio", error
        slope = error * rows.hidden_size / ratio**2
        yield "frame_ratio", slope
        yield "tight_frame_distance", _divided(slope, 2 * (tight_frame_distance(rows) or 0.0))
        yield "identity_distance", _divided(error, 2 * rows.total * (identity_distance(rows) or 0.0))
    score = isoscore(rows)
    if score is not None:
        squares, gram = rows.centred()
        mean = sum((block.sum(axis=0) for _, block in rows.blocks()), start=np.zeros(rows.hidden_size)) / rows.count
        relative = _relative_spread(rows, gram, squares, lambda block, _: block - mean)
        yield "isoscore", (score + 1 / (rows.hidden_size - 1)) * spread * relative
    if shows_spectrum(rows):
        yield from _errors_of_spectrum(rows, spread)


def _errors_of_cosines(rows: Rows) -> Iterator[tuple[str, float]]:
    count = rows.nonzero.size
    spread = 2 * math.sqrt(_missing(count, rows.in_table(count)) / count)
    if mean_cosine(rows) is not None:
        total = sum((block.sum(axis=0) for _, block in rows.unit_blocks()), start=np.zeros(rows.hidden_size))
        with_all = np.concatenate([block @ total for _, block in rows.unit_blocks()])[rows.nonzero]
        yield "mean_cosine", spread * float(with_all.std()) / (count - 1)
    if mean_squared_cosine(rows) is not None:
        with_all = _squared_products(rows, rows.unit_gram(), _unit(rows))[rows.nonzero]
        yield "mean_squared_cosine", spread * float(with_all.std()) / (count - 1)


def _errors_of_spectrum(rows: Rows, spread: float) -> Iterator[tuple[str, float]]:
    """The errors of effective rank and isotropy. A sample that shows the spectrum is not wide."""
    eigenvalues, vectors = rows.spectrum()
    values = np.sqrt(eigenvalues)
    used = values > 0
    if not used.any():
        return
    shares = values[used] / values.sum()
    entropy = -float(shares @ np.log(shares))
    slopes = np.zeros(values.size)
    slopes[used] = -(np.log(shares) + entropy) / (2 * values.sum() * values[used])
    influences = np.concatenate(
        [np.square(np.ldexp(part, -rows.exponent)) @ slopes for part in coordinates(rows, eigenvalues, vectors)]
    )
    rank = math.exp(entropy)
    left_over = 2 * rank_shortfall(rows) ** 2 / rank  # after the correction
    yield "effective_rank", math.hypot(rank * spread * float(influences.std()), left_over)
    log_z = log_partition(rows)
    low, high = (_shares_of_partition(rows, int(at), float(log_z[at])) for at in (log_z.argmin(), log_z.argmax()))
    of_directions = (log_isotropy(rows.halves()[0]) - log_isotropy(rows.halves()[1])) / 2
    of_rows = math.hypot(float((low - high).std()) * math.sqrt(rows.count), of_directions)
    relative = math.hypot(of_rows * math.sqrt(_missing(rows.count, rows.total)), isotropy_shortfall(rows) / 3)
    yield "isotropy", (isotropy(rows) or 0.0) * relative


def _shares_of_partition(rows: Rows, at: int, log_z: float) -> Floats:
    """exp(c . e_i) / Z(c) for each row, with c the eigenvector at this place of `log_partition`."""
    eigenvalues, vectors = rows.spectrum()
    negative, column = divmod(at, eigenvalues.size)
    one = [column]
    parts = [part[:, 0] for part in coordinates(rows, eigenvalues[one], vectors[:, one])]
    projections = np.concatenate(parts).astype(np.float64)
    shares: Floats = np.exp((-projections if negative else projections) - log_z)
    return shares


def _relative_spread(rows: Rows, gram: Array, squares: Floats, changed: Callable[[Floats, slice], Floats]) -> float:
    """The standard deviation of the influences on the logarithm of (tr G)^2 / ||G||_F^2."""
    products = _squared_products(rows, gram, changed)
    if not squares.sum() or not products.sum():
        return 0.0
    return float((2 * squares / squares.sum() - 2 * products / products.sum()).std())


def _squared_products(rows: Rows, gram: Array, changed: Callable[[Floats, slice], Floats]) -> Floats:
    """sum_j (e_i . e_j)^2 for each row i, in float32: e_i^T G e_i."""
    if rows.wide:
        of_rows: Floats = np.square(gram, dtype=np.float64).sum(axis=1)
        return of_rows
    narrow = gram.astype(np.float32)
    parts = [np.empty(0)]
    for place, block in rows.blocks():
        part = changed(block, place).astype(np.float32)
        parts.append(np.vecdot(part @ narrow, part).astype(np.float64))
    return np.concatenate(parts)


def _unit(rows: Rows) -> Callable[[Floats, slice], Floats]:
    return lambda block, place: block / rows.lengths[place, None]


def _same(block: Floats, _: slice) -> Floats:
    return block


def _missing(drawn: int, of: int) -> float:
    """The share of the whole that was not drawn."""
    return max(0.0, 1 - drawn / of)


def _divided(error: float, by: float) -> float:
    return error / by if by else 0.0
