"""Exact mean and variance of the log of a softmax's denominator over V random logits of any width.

S = sum_j exp(sigma z_j), with z_j ~ N(0, 1) independent. Textbooks give ln V + sigma²/2, which holds while many terms
share the sum, and the random-energy model's sigma sqrt(2 ln V) + ... where the largest term dominates (Derrida, 1981);
the boundary between them is sigma = sqrt(2 ln V). Neither is needed. With X ~ Exp(1), the probability of X > e^u S is
the Laplace transform E exp(-e^u S) = phi(u)^V, phi(u) = E exp(-exp(u + sigma z)); so Y = ln X - ln S has a known
distribution, and since ln X has mean -euler and variance π²/6,

    E ln S = -euler - E Y        Var ln S = Var Y - π²/6.

An additional term exp(m + t z), for a token with another distribution, multiplies the transform by its own. A softcap
c of the logits puts c tanh(x / c) in place of each exponent x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError

__all__ = ["capped_moments", "critical_width", "log_sum_exp"]

Floats = npt.NDArray[np.float64]
GRID = 0.25
"""Step of u; the most for z. exp(-exp(u)) is analytic for |Im u| < π/2: a sum in steps of h is off by exp(-π²/h)."""
LARGEST = 40.0
"""Wider logits are scaled down to this: the largest term dominates there, and the log scales with them to 1e-3."""
REACH = 12.0
"""Range of z in standard deviations: the probability beyond it is less than 1e-32."""
WIDEST = 1000.0
"""Wider logits below a softcap are narrowed to this: the cap decides all of them but a few in a hundred."""


def critical_width(vocab_size: int) -> float:
    """The std sqrt(2 ln V) of logits, 4.65 at V = 50257, above which one token has most of the softmax.

    Example:
        >>> round(critical_width(50257), 2)
        4.65
    """
    return math.sqrt(2 * math.log(vocab_size))


def capped_moments(mean: float, width: float, cap: float | None) -> tuple[float, float]:
    """Mean and root mean square of cap tanh(x / cap), x of this mean and std; without a cap, those of x.

    Example:
        >>> capped_moments(3.0, 4.0, None)
        (3.0, 5.0)
        >>> capped_moments(1000.0, 4.0, 30.0)
        (30.0, 30.0)
    """
    if cap is None:
        return mean, math.hypot(mean, width)
    z, weights = _normal(width, cap)
    values = cap * np.tanh((mean + width * z) / cap)
    total = weights.sum()
    return float(values @ weights / total), math.sqrt(float(values**2 @ weights / total))


def log_sum_exp(
    width: float, count: int, extra: Sequence[float] = (), extra_width: float = 0.0, *, cap: float | None = None
) -> list[tuple[float, float]]:
    """Mean and variance of ln sum_j exp(width z_j), over `count` terms.

    For logits of a std above `LARGEST`, the logits are scaled down and the result up, with an error within 1e-3.

    With `extra`, returns a mean and variance for each number m in it, with one more term exp(m + extra_width z). With
    `cap`, each exponent x is cap tanh(x / cap).

    Example:
        >>> (mean, variance), = log_sum_exp(1.0, 50257)
        >>> round(mean, 3), round(math.log(50257) + 1 / 2, 3)
        (11.325, 11.325)
        >>> (frozen, _), = log_sum_exp(27.7, 32128)  # far from ln V + width²/2, which is 394
        >>> round(frozen, 1)
        114.5
        >>> (capped, _), = log_sum_exp(27.7, 32128, cap=30.0)
        >>> round(capped, 1)
        36.2
    """
    if not all(map(math.isfinite, (width, extra_width, *extra))):
        raise UsageError("the logits are not finite, so they have no softmax", help="use a smaller std")
    over = max(width, extra_width, max(extra, default=0.0) / REACH) / LARGEST
    if cap is not None and cap <= LARGEST * REACH:  # the logits are bounded, however wide
        width, extra_width, over = min(width, WIDEST), min(extra_width, WIDEST), 0.0
    if over > 1:
        lower = None if cap is None else cap / over
        scaled = log_sum_exp(width / over, count, [m / over for m in extra], extra_width / over, cap=lower)
        return [(mean * over, variance * over**2) for mean, variance in scaled]
    largest = math.inf if cap is None else cap
    top = math.log(count) + min(width**2 / 2, REACH * width, largest)
    top = max([top, *(min(m + REACH * extra_width, largest) for m in extra)])
    bottom = 0.0 if count >= 100 else -min(REACH * width, largest)  # P(all z are negative) is 2^-100
    u = np.arange(-top - 40.0, -bottom + 12.0, GRID)
    common = count * np.log1p(-_lost(u, width, cap=cap))
    if not len(extra):
        return [_moments(u, common)]
    if cap is not None:
        return [_moments(u, common + np.log1p(-_lost(u, extra_width, m, cap))) for m in extra]
    return [_moments(u, common + np.log1p(-lost)) for lost in _lost_beyond(u, extra, extra_width)]


def _lost_beyond(u: Floats, extra: Sequence[float], width: float) -> Iterator[Floats]:
    """`_lost(u + m, width)` for each m; numbers that differ by whole steps share one computation."""
    known: dict[int, tuple[float, Floats]] = {}
    for m in extra:
        offset = round(m / GRID % 1 * 1e6)
        if offset not in known:
            alike = [other for other in extra if round(other / GRID % 1 * 1e6) == offset]
            steps = round((max(alike) - min(alike)) / GRID)
            known[offset] = min(alike), _lost(u[0] + min(alike) + GRID * np.arange(len(u) + steps), width)
        least, lost = known[offset]
        start = round((m - least) / GRID)
        yield lost[start : start + len(u)]


def _normal(width: float, cap: float | None) -> tuple[Floats, Floats]:
    """Values of a standard normal and their weights, close enough for a logit of this width."""
    steps = [GRID, 2 * GRID / width if width else GRID]
    if cap is not None and width:
        steps.append(GRID * cap / width)
    step = max(min(steps), GRID / (8 * WIDEST))
    z = np.arange(-REACH, REACH + step / 2, step)
    return z, np.exp(-z * z / 2) * (step / math.sqrt(2 * math.pi))


def _lost(u: Floats, width: float, mean: float = 0.0, cap: float | None = None) -> Floats:
    """1 - E exp(-exp(u + x)), without cancellation if it is small; x is mean + width z, below the cap."""
    if width == 0.0:
        at_mean = mean if cap is None else cap * math.tanh(mean / cap)
        return np.minimum(-np.expm1(-np.exp(np.minimum(u + at_mean, 7.0))), 1 - 1e-15)
    z, weights = _normal(width, cap)
    x = mean + width * z
    if cap is not None:
        x = cap * np.tanh(x / cap)
    lost = np.empty_like(u)
    for at in range(0, len(u), 256):
        some = u[at : at + 256, None] + x
        lost[at : at + 256] = -np.expm1(-np.exp(np.minimum(some, 7.0))) @ weights
    return np.minimum(lost, 1 - 1e-15)


def _moments(u: Floats, log_survival: Floats) -> tuple[float, float]:
    """Mean and variance of ln S, if exp(log_survival) is the probability of Y > u."""
    mass = -np.diff(np.exp(log_survival))
    places = (u[1:] + u[:-1]) / 2
    mean = float(mass @ places / mass.sum())
    variance = float(mass @ (places - mean) ** 2 / mass.sum()) - GRID**2 / 12  # less the variance within a step
    return -float(np.euler_gamma) - mean, max(0.0, variance - math.pi**2 / 6)
