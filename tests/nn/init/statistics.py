"""Tests of moments, with a stated rate of error. Seeds are fixed, so a test that passes once passes always."""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["LIMIT", "KURTOSIS", "z_of_mean", "z_of_std"]

LIMIT = 5.0
"""A right draw is beyond it once in 1.7 million tests."""


def _kurtosis_of_truncated(cut: float) -> float:
    z = np.linspace(-cut, cut, 200_001)
    density = np.exp(-z * z / 2)
    return float((density @ z**4) * density.sum() / (density @ z**2) ** 2)


KURTOSIS = {"normal": 3.0, "uniform": 1.8, "truncated": _kurtosis_of_truncated(2.0)}
"""E x⁴ / (E x²)²: the mean of n squares has the relative variance (kurtosis - 1) / n."""


def z_of_std(sample: torch.Tensor, std: float, kind: str = "normal") -> float:
    """How many of its standard errors the mean square of `sample` is from std², whose mean is known to be 0."""
    mean_square = float(sample.detach().double().square().mean())
    return (mean_square / std**2 - 1) / math.sqrt((KURTOSIS[kind] - 1) / sample.numel())


def z_of_mean(sample: torch.Tensor, std: float) -> float:
    return float(sample.detach().double().mean()) / (std / math.sqrt(sample.numel()))
