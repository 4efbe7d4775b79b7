"""The log of a softmax's denominator, compared with drawn sums, its two limits, and bounds that always hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.recipes.log_sum_exp import capped_moments, critical_width, log_sum_exp


def drawn(width: float, count: int, draws: int, extra: float | None = None, extra_width: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(0)
    logits = width * random.standard_normal((draws, count))
    if extra is not None:
        logits = np.hstack([logits, extra + extra_width * random.standard_normal((draws, 1))])
    top = logits.max(1, keepdims=True)
    return np.asarray(top[:, 0] + np.log(np.exp(logits - top).sum(1)))


@pytest.mark.parametrize(
    ("width", "count"), [(0.1, 1000), (1.0, 1000), (3.7, 1000), (8.0, 1000), (30.0, 300), (2.0, 2)]
)
def test_mean_and_variance_are_those_of_sums_that_are_drawn(width: float, count: int) -> None:
    """Within four standard errors of 4000 draws: one of these six fails by chance in 8000 runs."""
    found = drawn(width, count, 4000)
    ((mean, variance),) = log_sum_exp(width, count)
    assert abs(mean - found.mean()) < 4 * found.std() / math.sqrt(4000)
    assert variance == pytest.approx(found.var(), rel=0.15)


@pytest.mark.parametrize(("extra", "extra_width"), [(5.0, 0.0), (12.0, 1.0), (40.0, 8.0), (-5.0, 3.0)])
def test_one_term_that_is_unlike_the_others(extra: float, extra_width: float) -> None:
    found = drawn(4.0, 1000, 4000, extra, extra_width)
    ((mean, variance),) = log_sum_exp(4.0, 1000, [extra], extra_width)
    assert abs(mean - found.mean()) < 4 * found.std() / math.sqrt(4000)
    assert variance == pytest.approx(found.var(), rel=0.15)


def test_below_the_critical_width_it_is_the_textbooks_sum() -> None:
    for width in (0.02, 0.5, 1.0, 2.0):
        ((mean, _),) = log_sum_exp(width, 50257)
        assert mean == pytest.approx(math.log(50257) + width**2 / 2, abs=2e-3)


def test_far_above_it_the_sum_is_its_largest_term() -> None:
    """E max of V normals, by an integral over their distribution, is what is left when the width divides it out."""
    z = np.linspace(-10, 10, 200_001)
    tail = np.array([0.5 * math.erfc(one / math.sqrt(2)) for one in z[::20]])
    below = (1 - tail) ** 50257
    largest = float(z[::20][1:] @ np.diff(below))
    ((mean, _),) = log_sum_exp(100.0, 50257)
    assert mean / 100.0 == pytest.approx(largest, rel=2e-3)
    assert critical_width(50257) == pytest.approx(4.6525, abs=1e-3)


def test_a_single_term_is_itself() -> None:
    ((mean, variance),) = log_sum_exp(5.0, 1)
    assert mean == pytest.approx(0.0, abs=1e-6)
    assert variance == pytest.approx(25.0, rel=1e-6)


@settings(max_examples=60)
@given(width=st.floats(0, 40), count=st.integers(1, 300_000))
def test_whatever_the_width_it_is_between_what_is_always_true(width: float, count: int) -> None:
    """Jensen from both sides: ln V <= E ln S <= ln V + width²/2, and the sum is no less than its mean term."""
    ((mean, variance),) = log_sum_exp(width, count)
    assert math.log(count) - 1e-6 <= mean <= math.log(count) + width**2 / 2 + 1e-6
    assert 0 <= variance <= width**2 + 1e-6
    ((more, _),) = log_sum_exp(width, count, [0.0])
    assert more >= mean - 1e-6


@settings(max_examples=40)
@given(width=st.floats(0, 20), extra=st.floats(-50, 500))
def test_another_term_adds_at_least_itself(width: float, extra: float) -> None:
    ((mean, _),) = log_sum_exp(width, 1000, [extra])
    assert mean >= max(extra, log_sum_exp(width, 1000)[0][0]) - 1e-6


CAPPED = [
    (1.0, 1000, 30.0, 0.0, 0.0),
    (5.0, 1000, 5.0, 12.0, 1.0),
    (8.0, 1000, 30.0, 25.0, 3.0),
    (60.0, 300, 30.0, 90.0, 20.0),
    (3.0, 2, 0.5, -4.0, 1.0),
    (400.0, 300, 50.0, 700.0, 0.0),
    (60.0, 300, 1e5, 150.0, 4.0),
]
"""Width, count, softcap, and mean and width of one more term, before the cap."""


@pytest.mark.parametrize(("width", "count", "cap", "extra", "extra_width"), CAPPED)
def test_a_softcap_bounds_every_logit(width: float, count: int, cap: float, extra: float, extra_width: float) -> None:
    """Within four standard errors of 4000 draws, and the draw's own noise is far below what the cap changes."""
    random = np.random.default_rng(0)
    logits = width * random.standard_normal((4000, count))
    more = extra + extra_width * random.standard_normal((4000, 1))
    for terms, asked in ((logits, []), (np.hstack([logits, more]), [extra])):
        capped = cap * np.tanh(terms / cap)
        top = capped.max(1, keepdims=True)
        found = top[:, 0] + np.log(np.exp(capped - top).sum(1))
        ((mean, variance),) = log_sum_exp(width, count, asked, extra_width, cap=cap)
        assert abs(mean - found.mean()) < 4 * found.std() / math.sqrt(4000) + 1e-3 * abs(mean)
        assert variance == pytest.approx(found.var(), rel=0.2, abs=0.02)


@pytest.mark.parametrize(("width", "cap"), [(0.5, 30.0), (8.0, 5.0), (90.0, 30.0)])
def test_a_capped_logits_mean_and_width_are_those_of_draws(width: float, cap: float) -> None:
    values = cap * np.tanh((3.0 + width * np.random.default_rng(0).standard_normal(100_000)) / cap)
    mean, square = capped_moments(3.0, width, cap)
    assert mean == pytest.approx(values.mean(), abs=4 * values.std() / math.sqrt(100_000))
    assert square == pytest.approx(math.sqrt((values**2).mean()), rel=0.01)


def test_a_cap_far_above_the_logits_changes_nothing() -> None:
    for width, extra in ((1.0, [5.0]), (8.0, [])):
        ((mean, variance),) = log_sum_exp(width, 50257, extra, 1.0)
        assert log_sum_exp(width, 50257, extra, 1.0, cap=1e6)[0] == pytest.approx((mean, variance), abs=1e-6)
