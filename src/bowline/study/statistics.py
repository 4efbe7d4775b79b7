"""Means with standard errors, the comparison of two means, and writing numbers as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MeanDifference", "difference", "mean", "percent", "standard_error", "with_error", "written"]

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; for more degrees, 2 is used."""


def mean(values: Sequence[float]) -> float:
    """Return the mean.

    Example:
        >>> mean([1.0, 2.0])
        1.5
    """
    return statistics.fmean(values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, s / sqrt(n), or NaN for a single value.

    Example:
        >>> round(standard_error([1.0, 2.0, 3.0]), 3)
        0.577
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """The first mean minus the second, and the half-width of the 95 % interval."""

    value: float
    margin: float

    @property
    def clear(self) -> bool:
        """True if 0 lies outside of the interval."""
        return abs(self.value) > self.margin


def difference(first: Sequence[float], second: Sequence[float]) -> MeanDifference:
    """Compare two results seed by seed with Student's t at 95 %. Few seeds give wide intervals, as they should.

    Example:
        >>> difference([3.0, 3.4, 3.1], [2.0, 2.3, 2.2]).clear
        True
        >>> difference([3.0, 2.0], [2.0, 2.9]).clear
        False
    """
    gaps = [x - y for x, y in zip(first, second, strict=True)]
    if len(gaps) < 2:
        return MeanDifference(value=mean(gaps), margin=math.inf)
    quantile = QUANTILES[len(gaps) - 2] if len(gaps) - 2 < len(QUANTILES) else 2.0
    return MeanDifference(value=mean(gaps), margin=quantile * standard_error(gaps))


def written(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, with an exponent only below 1e-4.

    Example:
        >>> written(0.012345), written(161.04), written(24300000), written(4.4e-5), written(0.0), written(2.0)
        ('0.0123', '161', '24,300,000', '4.4e-05', '0', '2.00')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    if size < -4:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def with_error(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean and its standard error, as in `24.3 ± 0.2`; both end at the same decimal place.

    Example:
        >>> with_error([24.1, 24.3, 24.5]), with_error([0.5])
        ('24.3 ± 0.1', '0.500')
    """
    centre = mean(values)
    if len(values) < 2:
        return written(centre, digits)
    size = math.floor(math.log10(abs(centre))) if centre else 0
    places = max(0, digits - 1 - size) if centre else 0
    error = standard_error(values)
    shown = f"{error:.{places}f}"
    return f"{written(centre, digits)} ± {shown if float(shown) or not error else f'{error:.1g}'}"


def percent(share: float) -> str:
    """Format a share as a percentage, as in `93.1 %`. Only exact shares are written as 0 % or 100 %.

    Example:
        >>> percent(0.9312), percent(0.99996), percent(1.0), percent(0.00001)
        ('93.1 %', '99.996 %', '100 %', '0.001 %')
    """
    hundred = 100 * share
    if hundred in (0.0, 100.0):
        return f"{hundred:.0f} %"
    places = 1
    while places < 4 and float(f"{hundred:.{places}f}") in (0.0, 100.0):
        places += 1
    return f"{hundred:.{places}f} %"
