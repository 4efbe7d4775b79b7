"""Unusable rows, empty tables, and inputs that are not tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bowline import geometry
from bowline.errors import UsageError
from tests.geometry.tables import CLOSE, Matrix, gaussian, with_bad_rows


@pytest.mark.parametrize("shape", [(60, 5), (4, 9)])
def test_rows_that_are_not_finite_are_left_out_and_counted(shape: tuple[int, int]) -> None:
    table = gaussian(*shape)
    clean = geometry.describe(table).as_dict()
    found = geometry.describe(with_bad_rows(table)).as_dict()
    assert (found.pop("left_out_rows"), clean.pop("left_out_rows")) == (4, 0)
    assert (found.pop("rows"), clean.pop("rows")) == (shape[0] + 4, shape[0])
    assert found == clean


def test_row_numbers_are_those_of_the_table_given_when_rows_are_left_out() -> None:
    table = with_bad_rows(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]))
    assert geometry.self_decoding_failures(table).tolist() == [4]
    assert geometry.self_decoding_failures(table, [0, 5, 6]).tolist() == []
    neighbours, cosines = geometry.nearest_rows(table, [6, 5, 4, 0])
    assert neighbours.tolist() == [-1, 4, 5, -1]
    assert cosines.tolist() == CLOSE([np.nan, 1, 1, np.nan], nan_ok=True)


@pytest.mark.parametrize(("dtype", "bits"), [("f2", 0x7C01), ("f4", 0x7F800001), ("f8", 0x7FF0000000000001)])
def test_signalling_nans_warn_of_nothing(dtype: str, bits: int) -> None:
    table = gaussian(6, 3).astype(dtype)
    table.view(dtype.replace("f", "u"))[2, 1] = bits
    assert geometry.describe(table).left_out_rows == 1


def test_rows_of_zeros_are_left_out_of_cosines_and_of_self_decoding() -> None:
    table = gaussian(20, 3)
    padded = np.vstack([np.zeros((2, 3)), table])
    for figure in (geometry.mean_cosine, geometry.mean_squared_cosine, geometry.median_nearest_cosine):
        assert figure(padded) == CLOSE(figure(table)), figure.__name__
    report = geometry.describe(padded)
    assert (report.zero_rows, report.queried_rows) == (2, 20)
    assert report.self_decoding_rate == geometry.self_decoding_rate(table)
    assert report.row_norms is not None and report.row_norms.min == 0.0


NOTHING = (
    np.zeros((0, 4)),
    np.zeros((3, 0)),
    np.full((2, 3), np.nan),
    np.zeros((0, 0), dtype=np.float16),
)


@pytest.mark.parametrize("table", NOTHING, ids=["no rows", "no columns", "no finite rows", "nothing"])
def test_a_table_with_nothing_in_it_has_no_figures(table: Matrix) -> None:
    report = geometry.describe(table).as_dict()
    counts = {"rows", "hidden_size", "left_out_rows", "zero_rows", "queried_rows"}
    defined = {name for name, value in report.items() if value is not None} - counts
    # Rows without columns still have a norm and a distance from the identity.
    assert defined <= ({"row_norms", "identity_distance"} if table.shape == (3, 0) else set())


def test_one_row_has_no_pairs_and_a_row_of_zeros_no_direction() -> None:
    one = geometry.describe(np.array([[3.0, 4.0]]))
    assert (one.mean_cosine, one.mean_squared_cosine, one.welch_bound, one.median_nearest_cosine) == (None,) * 4
    assert (one.effective_rank, one.participation_ratio, one.self_decoding_rate) == (1.0, 1.0, 1.0)
    zeros = geometry.describe(np.zeros((3, 2)))
    assert (zeros.mean_cosine, zeros.effective_rank, zeros.participation_ratio, zeros.self_decoding_rate) == (None,) * 4
    assert (zeros.isotropy, zeros.identity_distance) == (1.0, 1.0)


@pytest.mark.parametrize("table", [np.zeros(3), np.zeros((2, 2, 2)), np.array([["a"]]), np.array([[1j]])])
def test_what_is_no_table_is_refused(table: Any) -> None:
    with pytest.raises(UsageError, match="table: expected"):
        geometry.describe(table)


@pytest.mark.parametrize("queries", [[-1], [3], [[0]], [0.5]])
def test_row_numbers_outside_the_table_are_refused(queries: Any) -> None:
    with pytest.raises(UsageError, match="queries: expected"):
        geometry.nearest_rows(np.eye(3), queries)
