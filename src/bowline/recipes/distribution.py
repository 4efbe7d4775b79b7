"""The distribution of one role's values, and the rule by which its scale follows the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from bowline.errors import UsageError

__all__ = ["Distribution", "Scale", "constant", "normal", "truncated", "uniform"]

SYMBOLS = {
    "hidden_size": "d",
    "embedding_size": "d_e",
    "head_size": "d_kv",
    "attention_size": "(h d_kv)",
    "intermediate_size": "d_ff",
    "num_layers": "L",
    "two_layers": "(2 L)",
    "fan_in": "fan_in",
    "fan_out": "fan_out",
    "fan_avg": "fan_avg",
}
"""The sizes that a scale may depend on, and their symbols. `fan_avg` is (fan_in + fan_out) / 2."""
LARGEST = 1e6
"""Larger factors are refused: a model cannot compute with such values."""
LEAST_CUT = 0.01
"""The smallest cut of a truncated normal; below it the draw is a uniform."""


@dataclass(frozen=True)
class Scale:
    """The scale factor · Π size^power: `Scale(0.02)`, or `Scale(1.0, {"hidden_size": -0.5})`, which is d^-1/2.

    Example:
        >>> residual = Scale(0.02, {"two_layers": -0.5})
        >>> print(residual, residual({"two_layers": 24}) == 0.02 / 24**0.5)
        0.02 (2 L)^-1/2 True
    """

    factor: float = 1.0
    powers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.powers, Mapping):
            raise UsageError(f"powers={self.powers!r:.60}: expected {{size: power}}")
        strange = [name for name in self.powers if name not in SYMBOLS]
        if strange:
            raise UsageError(f"powers has {strange[0]!r}: expected one of {', '.join(SYMBOLS)}")
        if not all(map(_is_number, self.powers.values())):
            raise UsageError(f"powers={dict(self.powers)!r:.60}: expected finite numbers")
        if not _is_number(self.factor) or not 0 <= self.factor <= LARGEST:
            raise UsageError(f"factor={self.factor!r:.60}: expected a finite number from 0 to {LARGEST:g}")
        object.__setattr__(self, "powers", MappingProxyType(dict(self.powers)))

    def __call__(self, sizes: Mapping[str, float]) -> float:
        """The value in a model of these sizes.

        Raises:
            UsageError: the model lacks one of the sizes.
        """
        value = self.factor
        for name, power in self.powers.items():
            if name not in sizes:
                raise UsageError(f"the scale {self} needs {name}, and the model has only {', '.join(sorted(sizes))}")
            value *= sizes[name] ** power
        return value

    def __str__(self) -> str:
        parts = [f"{SYMBOLS[name]}{_power(power)}" for name, power in self.powers.items()]
        if self.factor != 1 or not parts:
            parts.insert(0, f"{self.factor:.4g}")
        return " ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _power(power: float) -> str:
    known = {1.0: "", 0.5: "^1/2", -0.5: "^-1/2", -1.0: "^-1"}
    return known.get(power, f"^{power:g}")


@dataclass(frozen=True)
class Distribution:
    """The distribution of one role's values. Its mean is 0, unless it is constant.

    Made by `normal`, `truncated`, `uniform` and `constant`. `scale` is the standard deviation of a normal (before any
    truncation), the bound of a uniform, or the constant itself.
    """

    kind: str
    scale: Scale
    cut: float = math.inf
    """For a truncated normal: values beyond this many standard deviations are drawn again."""

    def __post_init__(self) -> None:
        if self.kind not in ("normal", "truncated", "uniform", "constant"):
            raise UsageError(f"kind={self.kind!r:.60}: expected normal, truncated, uniform or constant")
        if not isinstance(self.scale, Scale):
            raise UsageError(f"scale={self.scale!r:.60}: expected a Scale")
        if not isinstance(self.cut, (int, float)) or not self.cut >= LEAST_CUT:
            raise UsageError(f"cut={self.cut!r:.60}: expected a number of standard deviations from {LEAST_CUT}")

    def std(self, sizes: Mapping[str, float]) -> float:
        """The standard deviation of the drawn values; for a truncated normal or a uniform it is less than the scale.

        Example:
            >>> round(truncated(0.02).std({}), 5), round(uniform(0.1).std({}), 5)
            (0.01759, 0.05774)
        """
        scale = self.scale(sizes)
        return {"normal": scale, "truncated": scale * truncated_std(self.cut), "uniform": scale / math.sqrt(3)}.get(
            self.kind, 0.0
        )

    def mean(self, sizes: Mapping[str, float]) -> float:
        """The mean of the drawn values: 0, or the constant."""
        return self.scale(sizes) if self.kind == "constant" else 0.0

    def __str__(self) -> str:
        if self.kind == "constant":
            return str(self.scale)
        if self.kind == "uniform":
            return f"U(±{self.scale})"
        return f"N(0, {self.scale})" + (f" cut at {self.cut:g} std" if self.kind == "truncated" else "")


def normal(factor: float = 1.0, **powers: float) -> Distribution:
    """The normal N(0, std²), with std = factor · Π size^power.

    Example:
        >>> print(normal(0.02), "and", normal(hidden_size=-0.5, head_size=-0.5))
        N(0, 0.02) and N(0, d^-1/2 d_kv^-1/2)
    """
    return Distribution("normal", Scale(factor, powers))


def truncated(factor: float = 1.0, *, cut: float = 2.0, corrected: bool = False, **powers: float) -> Distribution:
    """A normal, drawn again beyond `cut` standard deviations; if `corrected`, widened so that the std is the scale.

    Example:
        >>> round(truncated(0.02, corrected=True).std({}), 5)
        0.02
    """
    plain = Distribution("truncated", Scale(factor, powers), cut)
    return replace(plain, scale=Scale(factor / truncated_std(cut), powers)) if corrected else plain


def uniform(factor: float = 1.0, **powers: float) -> Distribution:
    """The uniform U(-bound, bound), with bound = factor · Π size^power."""
    return Distribution("uniform", Scale(factor, powers))


def constant(value: float) -> Distribution:
    """The same value for every element."""
    return Distribution("constant", Scale(value))


def truncated_std(cut: float) -> float:
    """The standard deviation of N(0, 1) given |z| <= cut: sqrt(1 - 2 c φ(c) / (2 Φ(c) - 1)), 0.8796 at 2."""
    if math.isinf(cut):
        return 1.0
    density = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))
