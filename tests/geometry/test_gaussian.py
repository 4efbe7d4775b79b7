"""The Gaussian reference against drawn tables, and against integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bowline import geometry
from bowline.errors import UsageError
from tests.geometry.tables import CLOSE, gaussian

SHAPES = [(2000, 200), (200, 2000), (400, 400), (600, 300)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_participation_ratio_is_that_of_a_drawn_table(shape: tuple[int, int]) -> None:
    assert geometry.participation_ratio(gaussian(*shape)) == CLOSE(
        geometry.gaussian_participation_ratio(*shape), rel=0.02
    )


def test_the_participation_ratio_of_the_smallest_table() -> None:
    assert geometry.gaussian_participation_ratio(1, 1) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_eigenvalues_are_those_of_a_drawn_table(shape: tuple[int, int]) -> None:
    drawn = np.linalg.svd(gaussian(*shape), compute_uv=False) ** 2
    expected = geometry.gaussian_eigenvalues(*shape)
    assert expected.mean() == CLOSE(1, abs=1e-4)
    assert np.all(np.diff(expected) < 0)
    assert np.abs(drawn / drawn.mean() - expected).max() < 0.1


@pytest.mark.parametrize("hidden_size", [3, 4, 64, 384, 4096])
def test_the_densities_have_mass_one_and_their_variance(hidden_size: int) -> None:
    places, step = np.linspace(-1, 1, 200_000, endpoint=False, retstep=True)
    cosines = geometry.gaussian_cosine_density(places + step / 2, hidden_size)
    assert [cosines.sum() * step, (cosines * places**2).sum() * step] == CLOSE([1, 1 / hidden_size], abs=1e-5)
    places, step = np.linspace(0, 5, 200_000, endpoint=False, retstep=True)
    norms = geometry.gaussian_norm_density(places, hidden_size)
    assert [norms.sum() * step, (norms * places**2).sum() * step] == CLOSE([1, 1], abs=1e-5)


def test_the_densities_are_those_of_a_drawn_table() -> None:
    table = gaussian(2000, 16)
    norms = np.linalg.norm(table, axis=1)
    unit = table / norms[:, None]
    cosines = (unit @ unit.T)[np.triu_indices(2000, 1)]
    for drawn, density in (
        (cosines, geometry.gaussian_cosine_density),
        (norms / math.sqrt(16), geometry.gaussian_norm_density),
    ):
        edges = np.quantile(drawn, np.linspace(0.02, 0.98, 9))
        found, _ = np.histogram(drawn, edges, density=True)
        fine = np.linspace(edges[:-1], edges[1:], 101)
        expected = density(fine, 16).mean(axis=0)
        assert found / found.sum() == CLOSE(expected / expected.sum(), rel=0.15)


def test_outside_their_range_the_densities_are_0() -> None:
    assert geometry.gaussian_cosine_density([-2.0, -1.0, 1.0, 1.5], 2).tolist() == [0, 0, 0, 0]
    assert geometry.gaussian_norm_density([-1.0, 0.0], 3).tolist() == [0, 0]


def test_no_shape_of_a_table_is_refused() -> None:
    for refused in (
        lambda: geometry.gaussian_participation_ratio(0, 3),
        lambda: geometry.gaussian_eigenvalues(3, 0),
        lambda: geometry.gaussian_cosine_density(0.0, 1),
        lambda: geometry.gaussian_norm_density(0.0, 0),
    ):
        with pytest.raises(UsageError, match=r"expected at least one row and [12] dimensions"):
            refused()
