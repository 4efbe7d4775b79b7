"""The closest rows by cosine, against a sort of all cosines in float64."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.geometry import closest_rows, nearest_rows


def brute_force(table: np.ndarray, query: int) -> np.ndarray:
    """The cosine of a row with each other row, in float64; -inf with itself and where there is none."""
    wide = table.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (wide @ wide[query]) / norms / norms[query]
    cosines[query] = -np.inf
    return np.where(np.isfinite(cosines), cosines, -np.inf)


@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_cosines_are_those_of_a_sort_of_all(rows: int, columns: int, count: int, seed: int) -> None:
    table = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    ids, cosines = closest_rows(table, count=count)
    for query in range(rows):
        expected = np.sort(brute_force(table, query))[::-1][: min(count, rows - 1)]
        np.testing.assert_allclose(cosines[query, : expected.size], expected, atol=2e-6)
        assert (ids[query, expected.size :] == -1).all() and np.isnan(cosines[query, expected.size :]).all()
        named = ids[query, : expected.size]
        assert query not in named and len(set(named.tolist())) == named.size
        np.testing.assert_allclose(brute_force(table, query)[named], cosines[query, : named.size], atol=2e-6)


def test_a_table_of_many_blocks_and_many_batches_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(1).normal(size=(700, 16)).astype(np.float32)
    whole = closest_rows(table, count=5)
    monkeypatch.setattr("bowline.geometry.row_neighbours.SCORES_AT_ONCE", 700)
    monkeypatch.setattr("bowline.geometry.row_neighbours.QUERIES_AT_ONCE", 90)
    parts = closest_rows(table, count=5)
    np.testing.assert_array_equal(whole[0], parts[0])
    np.testing.assert_allclose(whole[1], parts[1], atol=2e-6)


def test_the_first_of_them_is_the_nearest_row() -> None:
    table = np.random.default_rng(2).normal(size=(3000, 24)).astype(np.float32)
    ids, cosines = closest_rows(table, [5, 2999, 5], count=3)
    nearest, cosine = nearest_rows(table, [5, 2999, 5])
    np.testing.assert_array_equal(ids[:, 0], nearest)
    np.testing.assert_allclose(cosines[:, 0], cosine, atol=1e-6)


def test_rows_without_a_direction_have_no_neighbours_and_are_none() -> None:
    table = np.array([[1.0, 0.0], [0.0, 0.0], [np.nan, 1.0], [1.0, 1.0], [np.inf, 0.0]])
    ids, cosines = closest_rows(table, count=4)
    assert ids.tolist() == [[3, -1, -1, -1], [-1] * 4, [-1] * 4, [0, -1, -1, -1], [-1] * 4]
    assert cosines[0, 0] == pytest.approx(np.sqrt(0.5), abs=1e-6)


def test_equal_rows_are_closest_to_each_other() -> None:
    table = np.random.default_rng(3).normal(size=(50, 8))
    table[7] = 3 * table[40]
    ids, cosines = closest_rows(table, [7, 40], count=1)
    assert ids.ravel().tolist() == [40, 7] and cosines == pytest.approx(1.0, abs=1e-6)


def test_opposite_rows_are_still_found() -> None:
    ids, cosines = closest_rows(np.array([[1.0, 0.0], [-1.0, 0.0]]), count=1)
    assert ids.tolist() == [[1], [0]] and cosines.tolist() == [[-1.0], [-1.0]]


def test_no_rows_are_asked_for() -> None:
    with pytest.raises(UsageError, match="count: expected 1 or more, got 0"):
        closest_rows(np.eye(3), count=0)


def test_rows_that_are_all_equal_take_no_more_memory_than_others() -> None:
    peaks = []
    for table in (np.random.default_rng(3).normal(size=(5000, 4)).astype(np.float32), np.ones((5000, 4), np.float32)):
        tracemalloc.start()
        ids, cosines = closest_rows(table, count=8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    assert ids[0].tolist() == list(range(1, 9)) and ids[4999].tolist() == list(range(8))
    np.testing.assert_allclose(cosines, 1.0, atol=1e-6)
