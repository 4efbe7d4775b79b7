"""Diagnostics from the eigenvalues of E^T E: directions in use, and distances from a tight frame and the identity."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from bowline.geometry.gram import sum_of_squares, without_diagonal
from bowline.geometry.table_checks import Array, Floats, Table
from bowline.geometry.usable_rows import Rows

__all__ = [
    "can_be_halved",
    "coordinates",
    "effective_rank",
    "frame_ratio",
    "identity_bound",
    "identity_distance",
    "isoscore",
    "isotropy",
    "isotropy_shortfall",
    "log_isotropy",
    "log_partition",
    "participation_ratio",
    "rank_shortfall",
    "shows_spectrum",
    "tight_frame_distance",
]


SPECTRUM_ROWS = 2
"""A sample shows the spectrum of a table if it has at least this many rows for each dimension."""


def shows_spectrum(rows: Rows) -> bool:
    """Whether these rows are the whole table, or a sample of at least two rows for each dimension."""
    return rows.stored == rows.stored_total or rows.count >= SPECTRUM_ROWS * rows.hidden_size


def isotropy(table: Table | Rows) -> float | None:
    """I(E) = min_c Z(c) / max_c Z(c), Z(c) = sum_i exp(c . e_i), c over the unit eigenvectors of E^T E; in [0, 1].

    After Mu and Viswanath, "All-but-the-Top" (2018), who leave the sign of an eigenvector open: here c is each
    eigenvector and its negative, 2 D directions, so that the figure is defined. It is 1 when no direction is
    preferred. Z is summed as log-sum-exp. Unlike the other diagnostics it depends on the scale of E: a small table is
    isotropic by being small. Where eigenvalues coincide, so that eigenvectors are not unique, it depends on the basis
    that the solver picks.

    Of the many directions of a flat spectrum, the extreme ones of a sample are those in which the sample differs from
    the table, so its I(E) is too low. For a sample of at least two rows for each dimension, ln I(E) is corrected to
    first order in 1 / sqrt(n), from the two halves of the sample. Where few directions stand out, the halves agree and
    the correction vanishes.

    Example:
        >>> isotropy(np.zeros((3, 2)))
        1.0
        >>> round(isotropy(np.array([[1.0], [1.0]])), 4), round(math.exp(-2.0), 4)
        (0.1353, 0.1353)
    """
    rows = Rows.of(table)
    if not rows.count or not rows.hidden_size:
        return None
    return math.exp(min(0.0, log_isotropy(rows) + isotropy_shortfall(rows)))


def effective_rank(table: Table | Rows) -> float | None:
    """exp(-sum_k p_k ln p_k), p_k = s_k / sum s, over the singular values s of E; in [1, min(V, D)].

    Roy and Vetterli, "The Effective Rank" (EUSIPCO 2007): the entropy is that of the singular values, not of their
    squares. None for a table of zeros.

    The spectrum of a sample is more uneven than the table's, so its effective rank r is too low. For a sample of at
    least two rows for each dimension it is corrected: by the shortfall s to first order, from the two halves of the
    sample, and by -3 s^2 / r to second order. The factor 3 fits random samples of four tables (SmolLM2's, MiniLM's, a
    Gaussian and a heavy-tailed one), of 2 to 13 rows for each dimension, with errors below 2 s^2 / r.

    Example:
        >>> round(effective_rank(np.eye(5, 3)), 6)
        3.0
    """
    rows = Rows.of(table)
    rank = _entropy_rank(rows.spectrum()[0])
    if rank is None:
        return None
    missing = rank_shortfall(rows)
    return min(rank + max(0.0, missing - 3 * missing**2 / rank), float(rows.hidden_size))


def rank_shortfall(rows: Rows) -> float:
    """By how much the effective rank of a sample is lower than the table's, to first order in 1 / n; else 0."""
    rank = _entropy_rank(rows.spectrum()[0])
    if rank is None or not can_be_halved(rows):
        return 0.0
    halves = [_entropy_rank(half.spectrum()[0]) or rank for half in rows.halves()]
    return max(0.0, (rank - sum(halves) / 2) * (1 - rows.count / rows.total))


def isotropy_shortfall(rows: Rows) -> float:
    """By how much ln I(E) of a sample is lower than the table's, to first order in 1 / sqrt(n); else 0.

    It is negative if the sample's is higher.
    """
    if not can_be_halved(rows):
        return 0.0
    own, halves = log_isotropy(rows), [log_isotropy(half) for half in rows.halves()]
    return (own - sum(halves) / 2) * (1 - math.sqrt(rows.count / rows.total)) / (math.sqrt(2) - 1)


def can_be_halved(rows: Rows) -> bool:
    """Whether these rows are a sample whose halves have as many rows as dimensions."""
    return rows.total > rows.count and rows.count >= SPECTRUM_ROWS * max(1, rows.hidden_size)


def log_isotropy(rows: Rows) -> float:
    """ln I(E) of these rows as a table of their own."""
    log_z = log_partition(rows)
    return float(log_z.min()) - float(log_z.max())


def _entropy_rank(eigenvalues: Floats) -> float | None:
    shares = np.sqrt(eigenvalues[eigenvalues > 0])
    if not shares.size:
        return None
    shares /= shares.sum()
    return math.exp(-float(shares @ np.log(shares)))


def isoscore(table: Table | Rows) -> float | None:
    """IsoScore (P' - 1) / (D - 1), P' the participation ratio of the rows less their mean; in [0, 1].

    Rudman, Gillman, Rayne and Eickhoff, "IsoScore: Measuring the Uniformity of Embedding Space Utilization" (Findings
    of ACL 2022): the variances v along the principal axes, brought to length sqrt(D), are at most
    sqrt(2 (D - sqrt D)) from (1, ..., 1). With delta their distance as a share of that, k = (D - delta^2 (D -
    sqrt D))^2 / D directions are in use, and (k - 1) / (D - 1) is the score. Expanding the distance leaves
    k = (sum v)^2 / sum v^2, so that no eigenvector is needed. 1 when the variance is the same in every direction, 0
    when it lies in one; an offset common to all rows does not count. None for fewer than two rows or dimensions, or
    when all rows are equal.

    Example:
        >>> isoscore(np.array([[9.0, 1.0], [9.0, -1.0], [8.0, 0.0], [10.0, 0.0]]))
        1.0
        >>> isoscore(np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
        0.0
    """
    rows = Rows.of(table)
    if rows.count < 2 or rows.hidden_size < 2:
        return None
    directions = _participation(rows, *rows.centred())
    return None if directions is None else max(0.0, (directions - 1) / (rows.hidden_size - 1))


def participation_ratio(table: Table | Rows) -> float | None:
    """P = (sum_k l_k)^2 / sum_k l_k^2 over the eigenvalues l of E^T E; in [1, min(V, D)].

    The number of directions that carry the squared norm: the participation ratio of Bell and Dean (1970).
    Computed without an eigensolver, as (tr E^T E)^2 / ||E^T E||_F^2. Not centred: a common offset counts as a
    direction. None for a table of zeros.

    Example:
        >>> participation_ratio(np.eye(5, 3))
        3.0
    """
    rows = Rows.of(table)
    return _participation(rows, rows.squared_norms, rows.gram())


def frame_ratio(table: Table | Rows) -> float | None:
    """D sum_k l_k^2 / (sum_k l_k)^2 = D / P over the eigenvalues l of E^T E; in [1, D].

    The frame potential sum_ij (e_i . e_j)^2 divided by its minimum for rows of the same total squared norm (Benedetto
    and Fickus, "Finite Normalized Tight Frames", 2003): 1 for a tight frame. None for a table of zeros.

    Example:
        >>> frame_ratio(np.array([[1.0, 0.0], [1.0, 0.0]]))
        2.0
    """
    rows = Rows.of(table)
    ratio = participation_ratio(rows)
    return None if ratio is None else rows.hidden_size / ratio


def tight_frame_distance(table: Table | Rows) -> float | None:
    """||E^T E / c - I||_F / sqrt(D), c = tr(E^T E) / D, which is sqrt(D / P - 1); in [0, sqrt(D - 1)].

    0 exactly for a tight frame (Benedetto and Fickus, 2003), the only sense in which a table with V > D can be
    orthogonal. The resolution is about 1e-7. None for a table of zeros.

    Example:
        >>> tight_frame_distance(np.vstack([np.eye(3), np.eye(3)]))
        0.0
    """
    ratio = frame_ratio(table)
    return None if ratio is None else math.sqrt(max(0.0, ratio - 1))


def identity_distance(table: Table | Rows) -> float | None:
    """min_a ||a E E^T - I||_F / sqrt(V), which is sqrt(1 - P / V); in [`identity_bound`, 1].

    The minimum is at a = tr(G) / ||G||_F^2 with G = E^T E (D, D), whose trace and norm are those of E E^T: no V x V
    matrix is needed. 1 for a table of zeros, None without rows.

    Example:
        >>> identity_distance(2 * np.eye(4))
        0.0
    """
    rows = Rows.of(table)
    if not rows.count:
        return None
    return math.sqrt(max(0.0, 1 - (participation_ratio(rows) or 0.0) / rows.total))


def identity_bound(rows: int, hidden_size: int) -> float | None:
    """The lower bound of `identity_distance` for V rows in D dimensions: sqrt(max(0, V - D) / V).

    E E^T has rank at most D, so V - D of its eigenvalues are 0 instead of 1. A tight frame reaches the bound.
    None without rows.

    Example:
        >>> round(identity_bound(30522, 384), 4)
        0.9937
    """
    if rows < 1 or hidden_size < 1:
        return None
    return math.sqrt(max(0, rows - hidden_size) / rows)


def _participation(rows: Rows, squared_norms: Floats, gram: Array) -> float | None:
    """(tr G)^2 / ||G||_F^2 of these rows, or of the same less their mean."""
    count, total = rows.count, rows.total
    trace = float(squared_norms.sum())
    if trace == 0 or (count == 1 and total > 1):
        return None
    # ||E^T E||_F^2 is the sum of ||e_i||^4 over the rows and of (e_i . e_j)^2 over the pairs. For a sample,
    # each sum is scaled to the table's number of rows or pairs: P of the sample alone is too small.
    fourth_powers = float(squared_norms @ squared_norms)
    off_diagonal = sum_of_squares(without_diagonal(gram)) if rows.wide else sum_of_squares(gram) - fourth_powers
    pairs = max(0.0, off_diagonal)
    per_row = total / count
    per_pair = total * (total - 1) / (count * (count - 1)) if count > 1 else 0.0
    ratio = (trace * per_row) ** 2 / (fourth_powers * per_row + pairs * per_pair)
    return min(ratio, float(rows.hidden_size), float(total))


def log_partition(rows: Rows) -> Floats:
    """ln Z(c) for every eigenvector c of the Gram matrix, and for every -c."""
    if rows.log_partition is not None:
        return rows.log_partition
    eigenvalues, vectors = rows.spectrum()
    log_z = np.full((2, eigenvalues.size), -np.inf)
    for part in coordinates(rows, eigenvalues, vectors):
        for signed, sums in zip((part, -part), log_z, strict=True):
            highest = signed.max(axis=0)
            z = np.exp(signed - highest).sum(axis=0, dtype=np.float64)
            np.logaddexp(sums, highest + np.log(z), out=sums)
    # With fewer rows than dimensions the other eigenvectors are orthogonal to every row: Z = V.
    rows.log_partition = np.append(log_z, [math.log(rows.count)] if rows.wide else [])
    return rows.log_partition


def coordinates(rows: Rows, eigenvalues: Floats, vectors: Array) -> Iterator[Array]:
    """c . e_i for every eigenvector c, in blocks of rows."""
    if rows.wide:  # for E E^T, the eigenvectors times the singular values are the coordinates themselves
        yield np.ldexp(vectors * np.sqrt(eigenvalues), rows.exponent)
        return
    narrow = vectors.astype(np.float32)
    for _, block in rows.blocks():
        part = block.astype(np.float32) @ narrow
        yield np.ldexp(part.astype(np.float64), rows.exponent) if rows.exponent else part
