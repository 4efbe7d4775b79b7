"""IsoScore agrees with the seven steps of its paper; tables for which it is 0, 1 or None."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from bowline import geometry
from tests.geometry.tables import CLOSE, Matrix, gaussian, tables, with_bad_rows


def by_its_steps(points: Matrix) -> float:
    """Rudman et al. (2022), section 4: reorient by principal axes, normalise the variances, measure, rescale."""
    n = points.shape[1]
    axes = np.linalg.eigh(np.cov(points, rowvar=False))[1]
    variances = (points @ axes).var(axis=0, ddof=1)
    normalised = math.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalised - np.ones(n)) / math.sqrt(2 * (n - math.sqrt(n)))
    fraction = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2
    return float((n * fraction - 1) / (n - 1))


@given(tables())
def test_it_is_what_the_steps_of_the_paper_give(table: Matrix) -> None:
    if min(table.shape) < 2 or (table == table[0]).all():
        assert geometry.isoscore(table) is None
    else:
        assert geometry.isoscore(table) == CLOSE(by_its_steps(table), abs=1e-6)


@pytest.mark.parametrize("shape", [(500, 40), (40, 60), (30, 30)])
@pytest.mark.parametrize("offset", [0.0, 3.0, -1000.0])
def test_an_offset_common_to_all_rows_does_not_count(shape: tuple[int, int], offset: float) -> None:
    table = gaussian(*shape) * np.linspace(0.1, 2, shape[1])
    assert geometry.isoscore(table + offset) == CLOSE(by_its_steps(table), abs=1e-9)
    assert geometry.isoscore((table + offset).astype(np.float32)) == CLOSE(by_its_steps(table), rel=1e-4)


@pytest.mark.parametrize("shape", [(1500, 1100), (1100, 1500)])
@pytest.mark.parametrize("offset", [0.0, 2.0, 100.0])
def test_a_gram_matrix_in_float32_is_enough(shape: tuple[int, int], offset: float) -> None:
    table = (gaussian(*shape) * np.linspace(0.1, 2, shape[1]) + offset).astype(np.float32)
    centred = table.astype(np.float64) - table.mean(axis=0, dtype=np.float64)
    gram = centred.T @ centred if shape[0] > shape[1] else centred @ centred.T
    directions = np.trace(gram) ** 2 / np.square(gram).sum()
    assert geometry.isoscore(table) == CLOSE((directions - 1) / (shape[1] - 1), rel=1e-4)


@pytest.mark.parametrize("used", [1, 2, 5, 8])
def test_it_counts_the_directions_that_are_in_use(used: int) -> None:
    axes = np.vstack([np.eye(8), -np.eye(8)])
    axes[:, used:] = 0
    assert geometry.isoscore(axes) == CLOSE((used - 1) / 7)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4, 1e100])
def test_rows_that_are_all_equal_have_none(value: float) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        if value <= float(np.finfo(dtype).max):
            assert geometry.isoscore(np.full((1000, 3), value, dtype=dtype)) is None


def test_one_row_one_dimension_and_no_rows_have_none() -> None:
    for shape in ((1, 4), (4, 1), (0, 4), (4, 0)):
        assert geometry.isoscore(np.ones(shape) * np.arange(shape[0])[:, None]) is None


def test_rows_that_cannot_be_used_are_left_out() -> None:
    assert geometry.isoscore(with_bad_rows(gaussian(60, 5))) == geometry.isoscore(gaussian(60, 5))


@pytest.mark.parametrize("hidden_size", [25, 200])
def test_a_sample_estimates_that_of_the_whole_table(hidden_size: int) -> None:
    # 125 rows: five for each dimension, then fewer than dimensions.
    table = gaussian(3000, hidden_size) * np.linspace(0.2, 2, hidden_size) + 0.1
    whole = by_its_steps(table)
    found = 0.0
    for seed in range(10):
        chosen = geometry.sample_rows(3000, hidden_size, budget_bytes=125 * hidden_size * 4, seed=seed)
        assert chosen is not None
        score = geometry.isoscore(geometry.Rows(table[chosen], total=3000))
        assert score is not None
        found += score / 10
    assert found == CLOSE(whole, rel=0.03)
    assert by_its_steps(table[:125]) < 0.95 * whole
