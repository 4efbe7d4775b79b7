"""The expected diagnostics of a (V, D) table of independent Gaussian entries of one variance, for comparison."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry.table_checks import Floats

__all__ = [
    "gaussian_cosine_density",
    "gaussian_eigenvalues",
    "gaussian_norm_density",
    "gaussian_participation_ratio",
]

GRID = 4096
"""Points at which the Marchenko-Pastur density is summed: eigenvalues to about 1e-6 of their mean."""


def gaussian_participation_ratio(rows: int, hidden_size: int) -> float:
    """E[(tr G)^2] / E[||G||_F^2] of a Gaussian table, G = E^T E: (V D + 2) / (V + D + 1); in [1, min(V, D)].

    From the moments of a Wishart matrix (Muirhead, "Aspects of Multivariate Statistical Theory", 1982).

    Example:
        >>> round(gaussian_participation_ratio(30522, 384), 1)
        379.2
    """
    _check(rows, hidden_size, least=1)
    return (rows * hidden_size + 2) / (rows + hidden_size + 1)


def gaussian_eigenvalues(rows: int, hidden_size: int) -> Floats:
    """The min(V, D) eigenvalues of E^T E that are not 0, in units of their mean, descending; in [0, 4].

    The quantiles at (k + 1/2) / min(V, D) of Marchenko and Pastur's law ("Distribution of eigenvalues for some sets
    of random matrices", 1967), whose ratio is D / V: between (1 - sqrt(D / V))^2 and (1 + sqrt(D / V))^2 for V > D.

    Example:
        >>> np.round(gaussian_eigenvalues(30522, 384)[[0, -1]], 2)
        array([1.23, 0.79])
    """
    _check(rows, hidden_size, least=1)
    count = min(rows, hidden_size)
    ratio = count / max(rows, hidden_size)  # E^T E and E E^T have the same nonzero eigenvalues
    angles = (np.arange(GRID) + 0.5) * (math.pi / GRID)
    support = 1 + ratio + 2 * math.sqrt(ratio) * np.cos(angles)
    mass = np.cumsum(np.sin(angles) ** 2 / support)
    wanted = (np.arange(count) + 0.5) / count
    return np.asarray(np.interp(wanted, (mass - 0.5 * np.diff(mass, prepend=0.0)) / mass[-1], support))


def gaussian_cosine_density(cosines: npt.ArrayLike, hidden_size: int) -> Floats:
    """The density of cos(e_i, e_j), i != j: proportional to (1 - x^2)^((D - 3) / 2) for |x| < 1, and 0 beyond.

    For two independent uniform directions in D > 1 dimensions; mean 0, variance 1 / D. For D = 2 it is unbounded at 1.

    Example:
        >>> gaussian_cosine_density([-0.5, 0.0, 0.5], 3)
        array([0.5, 0.5, 0.5])
    """
    _check(1, hidden_size, least=2)
    x = np.asarray(cosines, dtype=np.float64)
    inside = np.abs(x) < 1
    log_peak = math.lgamma(hidden_size / 2) - math.lgamma((hidden_size - 1) / 2) - 0.5 * math.log(math.pi)
    squares = np.square(np.where(inside, x, 0.0))
    return np.where(inside, np.exp(log_peak + 0.5 * (hidden_size - 3) * np.log1p(-squares)), 0.0)


def gaussian_norm_density(norms: npt.ArrayLike, hidden_size: int) -> Floats:
    """The density of ||e_i|| / sqrt(E ||e_i||^2), that of chi with D degrees of freedom over sqrt(D); 0 below 0.

    Near 1 with variance about 1 / (2 D).

    Example:
        >>> np.round(gaussian_norm_density([0.9, 1.0, 1.1], 384), 2)
        array([ 0.23, 11.05,  0.24])
    """
    _check(1, hidden_size, least=1)
    r = np.asarray(norms, dtype=np.float64)
    inside = r > 0
    logs = np.log(np.where(inside, r, 1.0))
    half = hidden_size / 2
    log_density = math.log(2) + half * math.log(half) - math.lgamma(half) + (hidden_size - 1) * logs - half * r**2
    return np.exp(np.where(inside, log_density, -np.inf))


def _check(rows: int, hidden_size: int, least: int) -> None:
    if rows < 1 or hidden_size < least:
        raise UsageError(
            f"expected at least one row and {least} dimensions, got {rows} rows of {hidden_size}",
            help="pass the shape of a table",
        )
