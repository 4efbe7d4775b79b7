"""The effect of an activation on Gaussians, from its expansion in Hermite polynomials: mean square and kernel.

For u, v ~ N(0, q) with correlation r, E f(u) f(v) = sum_n a_n² r^n, where a_n = E[f(sqrt(q) z) He_n(z)] / sqrt(n!)
(the dual activation of Daniely, Frostig and Singer, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError

__all__ = ["ACTIVATIONS", "kernel", "mean_square"]

Floats = npt.NDArray[np.float64]
TERMS = 24
NODES, _RAW = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS: Floats = _RAW / _RAW.sum()


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _gelu(x: Floats) -> Floats:
    return np.asarray(0.5 * x * (1 + np.array([math.erf(one / math.sqrt(2)) for one in x.ravel()]).reshape(x.shape)))


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), _gelu),  # the same to one to three digits
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    **dict.fromkeys(("silu", "swish"), lambda x: x * _sigmoid(x)),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "linear": lambda x: x,
}


def _function(name: str) -> Callable[[Floats], Floats]:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def mean_square(name: str, variance: float) -> float:
    """E f(z)² for z ~ N(0, variance).

    Example:
        >>> mean_square("relu", 3.0)  # half of it
        1.5
    """
    return round(float(WEIGHTS @ _function(name)(math.sqrt(variance) * NODES) ** 2), 12)


def kernel(name: str, variance: float, correlation: Floats) -> Floats:
    """E f(u) f(v) for u and v ~ N(0, variance), for each correlation.

    Example:
        >>> float(kernel("linear", 2.0, np.array([0.5])).round(6)[0])
        1.0
    """
    values = _function(name)(math.sqrt(variance) * NODES)
    total = float(WEIGHTS @ values**2)
    before, now = np.zeros_like(NODES), np.ones_like(NODES)  # He_n / sqrt(n!)
    found, left, power = np.zeros_like(correlation), total, np.ones_like(correlation)
    for n in range(TERMS):
        share = float(WEIGHTS @ (values * now)) ** 2
        found, left, power = found + share * power, left - share, power * correlation
        before, now = now, (NODES * now - math.sqrt(n) * before) / math.sqrt(n + 1)
    return np.asarray(found + max(0.0, left) * power)  # the rest belongs to higher powers: exact at 0 and 1
