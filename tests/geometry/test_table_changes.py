"""The change of each row, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bowline.errors import UsageError
from bowline.geometry import row_changes

TABLES = hnp.arrays(np.float64, (6, 4), elements=st.floats(-1e6, 1e6).map(lambda value: round(value, 3)))


@given(TABLES, TABLES)
def test_distances_and_cosines_are_those_of_the_definition(before: np.ndarray, after: np.ndarray) -> None:
    found = row_changes(before, after)
    norms = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
    distance = np.linalg.norm(after - before, axis=1)
    np.testing.assert_allclose(found.distance, distance, rtol=1e-12, atol=1e-300)
    np.testing.assert_array_equal(found.same, (before == after).all(axis=1))
    for row in range(6):
        if norms[0][row]:
            assert found.relative[row] == pytest.approx(distance[row] / norms[0][row], rel=1e-12)
        else:
            assert found.relative[row] == (np.inf if distance[row] else 0.0)
        if norms[0][row] and norms[1][row]:
            cosine = before[row] @ after[row] / norms[0][row] / norms[1][row]
            assert found.cosine[row] == pytest.approx(cosine, abs=1e-12)
        else:
            assert np.isnan(found.cosine[row])


def test_pairs_are_compared_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bowline.geometry.table_changes.ENTRIES_AT_ONCE", 8)
    before, after = np.random.default_rng(0).normal(size=(9, 3)), np.random.default_rng(1).normal(size=(5, 3))
    first, second = [8, 0, 3, 3, 4, 5], [0, 4, 2, 1, 1, 1]
    found = row_changes(before, after, before_rows=first, after_rows=second)
    np.testing.assert_allclose(found.distance, np.linalg.norm(after[second] - before[first], axis=1), rtol=1e-12)


def test_tables_of_different_lengths_are_compared_where_both_have_rows() -> None:
    assert row_changes(np.eye(3), np.eye(5)[:, :3]).same.tolist() == [True, True, True]


def test_values_at_the_ends_of_the_range_neither_overflow_nor_vanish() -> None:
    before, after = np.array([[1e200, 0.0], [1e-200, 0.0]]), np.array([[0.0, 1e200], [0.0, 1e-200]])
    found = row_changes(before, after)
    np.testing.assert_allclose(found.relative, np.sqrt(2.0), rtol=1e-12)
    np.testing.assert_allclose(found.cosine, 0.0, atol=1e-12)


def test_rows_that_are_not_finite_have_no_distance_but_can_be_equal() -> None:
    before = np.array([[np.nan, 1.0], [np.inf, 1.0], [1.0, 2.0]])
    found = row_changes(before, np.array([[np.nan, 1.0], [np.inf, 2.0], [np.nan, 2.0]]))
    assert found.same.tolist() == [True, False, False]
    assert np.isnan(found.distance).all() and np.isnan(found.cosine).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"after": np.eye(2)}, "rows of 3 and of 2 values cannot be compared"),
        ({"after": np.eye(3), "before_rows": [0]}, "before_rows and after_rows list pairs together"),
        ({"after": np.eye(3), "before_rows": [0, 1], "after_rows": [0]}, "2 rows of the one table and 1 of the other"),
        ({"after": np.eye(3), "before_rows": [3], "after_rows": [0]}, "3"),
    ],
)
def test_what_cannot_be_paired_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        row_changes(np.eye(3), **arguments)  # type: ignore[arg-type]


def test_changes_between_the_ends_of_float64_are_not_lost() -> None:
    small, large = np.array([[3e-310, 4e-310]]), np.array([[-1.2e308, 0.9e308]])
    changes = row_changes(np.vstack([large, large, small]), np.vstack([-large, large / 2, 3 * small]))
    np.testing.assert_allclose(changes.relative, [2.0, 0.5, 2.0], rtol=1e-12)
    np.testing.assert_allclose(changes.cosine, [-1.0, 1.0, 1.0], rtol=1e-12)
    assert changes.distance[0] == np.inf  # 3e308 is above the largest float64
    np.testing.assert_allclose(changes.distance[1:], [0.75e308, 1e-309], rtol=1e-12)


def test_only_a_row_of_zeros_has_an_infinite_relative_change() -> None:
    changes = row_changes(np.array([[0.0], [1e-300]]), np.array([[1.0], [1e300]]))
    assert changes.relative[0] == np.inf and changes.relative[1] == 1e300
