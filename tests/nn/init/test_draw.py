"""One tensor is drawn from what its distribution says: moments and shape, in every dtype and layout."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from bowline.errors import UsageError
from bowline.nn.init import draw
from bowline.nn.init.draw import draw_
from bowline.recipes import Distribution, Scale, constant, normal, truncated, uniform
from tests.nn.init.statistics import LIMIT, z_of_mean, z_of_std

SIZE = 40_000
RANDOM = {"normal": normal(0.02), "truncated": truncated(0.02), "uniform": uniform(0.02)}
EACH = pytest.mark.parametrize("kind", RANDOM)


def drawn(how: Distribution, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return draw_(torch.empty(shape, dtype=dtype), how, how.scale({}), torch.Generator().manual_seed(seed))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mean_and_std_are_the_distributions(kind: str, dtype: torch.dtype) -> None:
    sample, std = drawn(RANDOM[kind], SIZE, dtype=dtype), RANDOM[kind].std({})
    assert abs(z_of_mean(sample, std)) < LIMIT
    assert abs(z_of_std(sample, std, kind)) < LIMIT


def cumulative(kind: str, x: float) -> float:
    """P(X < x) by its formula, in units of the scale."""
    plain = NormalDist()
    if kind == "uniform":
        return (x + 1) / 2
    if kind == "truncated":
        low, high = plain.cdf(-2), plain.cdf(2)
        return min(1.0, max(0.0, (plain.cdf(x) - low) / (high - low)))
    return plain.cdf(x)


@EACH
def test_the_histogram_is_the_distributions(kind: str) -> None:
    # chi-square over 20 bins: beyond 65 once in a million draws that are right
    edges = torch.linspace(-1, 1, 21) if kind == "uniform" else torch.linspace(-2, 2, 21)
    seen = torch.histogram(drawn(RANDOM[kind], SIZE) / 0.02, edges).hist
    seen[0] += SIZE - seen.sum()  # a normal has tails
    shares = torch.tensor([cumulative(kind, b) - cumulative(kind, a) for a, b in pairwise(edges.tolist())])
    shares[0] += 1 - shares.sum()
    assert float(((seen - SIZE * shares) ** 2 / (SIZE * shares)).sum()) < 65


def test_nothing_lies_beyond_the_cut_of_a_truncated_normal_and_much_lies_near_it() -> None:
    for cut in (0.5, 1.0, 2.0, 3.0):
        how = truncated(0.02, cut=cut)
        sample = drawn(how, SIZE)
        assert 0.99 * cut * 0.02 < float(sample.abs().max()) <= cut * 0.02 * (1 + 1e-6)
        assert float(sample.std()) == pytest.approx(how.std({}), rel=0.03)


def test_a_corrected_truncated_normal_has_the_std_that_it_states() -> None:
    assert abs(z_of_std(drawn(truncated(0.02, corrected=True), SIZE), 0.02, "truncated")) < LIMIT


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK_ELEMENTS", 512)
    assert torch.equal(drawn(RANDOM[kind], 1000, dtype=dtype), drawn(RANDOM[kind], 1000).to(dtype))


@EACH
def test_a_view_is_drawn_as_a_tensor_of_its_own_would_be(kind: str) -> None:
    how, plain = RANDOM[kind], drawn(RANDOM[kind], 60, 40)
    home = torch.zeros(40, 100)
    view = home.t()[20:80]
    assert torch.equal(draw_(view, how, 0.02, torch.Generator().manual_seed(0)), plain)
    assert torch.equal(home.t()[20:80], plain)
    assert not home.t()[:20].any() and not home.t()[80:].any()


@EACH
def test_blocks_are_not_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK_ELEMENTS", 4096)
    sample = drawn(RANDOM[kind], 8192).view(2, 4096)
    correlation = float(torch.corrcoef(sample)[0, 1])
    assert abs(correlation) * math.sqrt(4096) < LIMIT


def test_a_constant_is_one_number_and_a_scale_of_zero_is_zero() -> None:
    assert set(drawn(constant(0.7), 9, dtype=torch.float64).tolist()) == {0.7}
    for how in (normal(0.0), truncated(0.0), uniform(0.0)):
        assert not drawn(how, 9).any()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="'cauchy'"):
        draw_(torch.empty(3), Distribution("cauchy", Scale()), 1.0)
