"""Tables with known figures, and the effect of scale, order and dtype."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from bowline import geometry
from tests.geometry.tables import CLOSE, SCALE_FREE, Matrix, gaussian, orthonormal, tables


@pytest.mark.parametrize("size", [1, 3, 8])
def test_orthonormal_rows_are_the_identity(size: int) -> None:
    table = 3 * orthonormal(size, size)
    assert geometry.identity_distance(table) == CLOSE(0, abs=1e-6)
    assert geometry.tight_frame_distance(table) == CLOSE(0, abs=1e-6)
    assert geometry.effective_rank(table) == CLOSE(size)
    assert geometry.participation_ratio(table) == CLOSE(size)
    assert geometry.self_decoding_rate(table) == 1.0


@pytest.mark.parametrize(("rows", "hidden_size"), [(12, 4), (9, 9), (100, 3)])
def test_a_tight_frame_reaches_the_identity_bound(rows: int, hidden_size: int) -> None:
    table = orthonormal(rows, hidden_size)
    assert geometry.frame_ratio(table) == CLOSE(1)
    assert geometry.tight_frame_distance(table) == CLOSE(0, abs=1e-6)
    assert geometry.identity_distance(table) == CLOSE(geometry.identity_bound(rows, hidden_size), abs=1e-6)


@pytest.mark.parametrize(("copies", "hidden_size"), [(2, 3), (5, 2), (3, 8)])
def test_a_tight_frame_of_unit_rows_reaches_the_welch_bound(copies: int, hidden_size: int) -> None:
    table = np.tile(np.eye(hidden_size), (copies, 1))
    bound = geometry.welch_bound(*table.shape)
    assert geometry.mean_squared_cosine(table) == CLOSE(bound)
    assert bound == CLOSE((copies - 1) / (copies * hidden_size - 1))


@given(tables(min_side=2))
def test_no_table_is_below_the_welch_bound(table: Matrix) -> None:
    found = geometry.mean_squared_cosine(table)
    rows = int(np.count_nonzero(np.linalg.norm(table, axis=1)))
    if found is not None:
        bound = geometry.welch_bound(rows, table.shape[1])
        assert bound is not None
        assert found >= bound - 1e-9


def test_a_table_of_rank_one_has_one_direction() -> None:
    table = np.outer(np.arange(1.0, 7.0), [1.0, 2.0, -1.0])
    assert geometry.effective_rank(table) == CLOSE(1, abs=1e-5)
    assert geometry.participation_ratio(table) == CLOSE(1)
    assert geometry.frame_ratio(table) == CLOSE(3)
    assert geometry.mean_cosine(table) == CLOSE(1)
    assert geometry.mean_squared_cosine(table) == CLOSE(1)
    assert geometry.median_nearest_cosine(table) == CLOSE(1)
    # Every row but the longest points at the longest.
    assert geometry.self_decoding_failures(table).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_rounding_below_zero_in_a_deficient_spectrum_is_zero(shape: tuple[int, int]) -> None:
    for seed in range(20):
        table = gaussian(shape[0], 2, seed) @ gaussian(2, shape[1], seed + 100)
        report = geometry.describe(table)
        assert report.effective_rank is not None and report.isotropy is not None
        assert report.effective_rank < 2 + 1e-6
        assert 0 <= report.isotropy < 1


def test_exact_duplicates_decode_to_themselves_at_any_size() -> None:
    distinct = gaussian(1000, 64).astype(np.float32)
    table = np.vstack([distinct, distinct[::-1], distinct])
    assert geometry.self_decoding_rate(table) == 1.0
    assert geometry.median_nearest_cosine(table) == CLOSE(1, abs=1e-6)


def test_a_row_hidden_by_a_slightly_longer_parallel_row_fails() -> None:
    table = np.array([[1.0, 0.0], [1.0001, 0.0], [0.0, 1.0]])
    assert geometry.self_decoding_failures(table).tolist() == [0]


def test_a_very_short_row_is_still_asked_beside_very_long_ones() -> None:
    table = np.array([[1e-50, 0.0], [1e4, 0.0], [0.0, 2e4]])
    assert geometry.self_decoding_failures(table).tolist() == [0]
    assert geometry.nearest_rows(table, [0])[0].tolist() == [1]


@pytest.mark.parametrize("scale", [-1.0, 1e-38, 3e-8, 7.0, 1e30])
@pytest.mark.parametrize("shape", [(60, 5), (4, 9)])
def test_the_scale_of_a_table_changes_only_its_norms(scale: float, shape: tuple[int, int]) -> None:
    table = gaussian(*shape)
    for figure in SCALE_FREE:
        assert figure(scale * table) == CLOSE(figure(table), rel=1e-5, abs=1e-6), figure.__name__
    norms, scaled = geometry.row_norm_quantiles(table), geometry.row_norm_quantiles(scale * table)
    assert norms is not None and scaled is not None
    assert scaled.p50 == CLOSE(abs(scale) * norms.p50)


@pytest.mark.parametrize("shape", [(60, 5), (4, 9)])
def test_the_order_of_the_rows_changes_nothing(shape: tuple[int, int]) -> None:
    table = gaussian(*shape)
    shuffled = np.random.default_rng(1).permutation(table)
    for figure in (*SCALE_FREE, geometry.isotropy):
        assert figure(shuffled) == CLOSE(figure(table), abs=1e-6), figure.__name__


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, np.int8])
def test_every_dtype_of_numbers_is_read(dtype: npt.DTypeLike) -> None:
    table = np.array([[3, 4], [0, 2], [-1, 0]])
    expected = geometry.describe(table.astype(np.float64)).as_dict()
    found = geometry.describe(table.astype(dtype)).as_dict()
    assert found.pop("row_norms") == CLOSE(expected.pop("row_norms"))
    assert found == CLOSE(expected)
