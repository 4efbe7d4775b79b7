"""The stated moments of distributions and scales agree with sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.recipes import Distribution, Scale, constant, normal, truncated, uniform
from bowline.recipes.distribution import SYMBOLS, truncated_std

SIZES = {"hidden_size": 64.0, "head_size": 16.0, "two_layers": 24.0, "fan_in": 64.0, "fan_avg": 160.0}


@pytest.mark.parametrize("cut", [0.5, 1.0, 2.0, 3.0])
def test_a_truncated_normal_is_narrower_by_what_an_integral_says(cut: float) -> None:
    z = np.linspace(-cut, cut, 200_001)
    density = np.exp(-z * z / 2)
    assert truncated_std(cut) == pytest.approx(math.sqrt((density * z * z).sum() / density.sum()), rel=1e-4)


def test_the_constant_that_jax_divides_by() -> None:
    assert truncated_std(2.0) == pytest.approx(0.87962566103423978, abs=1e-15)


@pytest.mark.parametrize(
    ("how", "std"),
    [
        (normal(0.02), 0.02),
        (normal(hidden_size=-0.5, head_size=-0.5), 1 / 32),
        (normal(0.02, two_layers=-0.5), 0.02 / math.sqrt(24)),
        (truncated(0.02), 0.02 * 0.8796256610),
        (truncated(fan_in=-0.5, corrected=True), 1 / 8),
        (uniform(0.1), 0.1 / math.sqrt(3)),
        (uniform(3**0.5, fan_avg=-0.5), 160**-0.5),
        (constant(1.0), 0.0),
    ],
    ids=str,
)
def test_the_std_of_what_is_drawn(how: Distribution, std: float) -> None:
    assert how.std(SIZES) == pytest.approx(std, rel=1e-9)


def test_a_scale_is_written_as_papers_write_it() -> None:
    assert str(Scale(0.02, {"two_layers": -0.5})) == "0.02 (2 L)^-1/2"
    assert str(normal(hidden_size=-0.5, head_size=-0.5)) == "N(0, d^-1/2 d_kv^-1/2)"
    assert str(truncated(0.02)) == "N(0, 0.02) cut at 2 std"
    assert str(uniform(fan_in=-0.5)) == "U(±fan_in^-1/2)"
    assert str(constant(1.0)) == "1"


@given(st.floats(0, 1e3), st.dictionaries(st.sampled_from(sorted(SYMBOLS)), st.floats(-2, 2), max_size=3))
def test_a_scale_is_a_product_of_powers(factor: float, powers: dict[str, float]) -> None:
    sizes = {name: 2.0 + place for place, name in enumerate(sorted(SYMBOLS))}
    expected = factor * math.prod(sizes[name] ** power for name, power in powers.items())
    assert Scale(factor, powers)(sizes) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_a_scale_does_not_change_after_it_was_made() -> None:
    powers = {"hidden_size": -0.5}
    scale = Scale(1.0, powers)
    powers["hidden_size"] = 5.0
    assert scale({"hidden_size": 4.0}) == 0.5


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="powers has 'width': expected one of hidden_size"):
        Scale(1.0, {"width": -0.5})
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a finite number from 0"):
            Scale(factor)
    with pytest.raises(UsageError, match="needs head_size, and the model has only hidden_size"):
        normal(head_size=-0.5).std({"hidden_size": 4.0})
