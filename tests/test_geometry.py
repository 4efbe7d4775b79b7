"""Every diagnostic against its definition written out over V x V, and against tables whose figures are known."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from bowline import geometry
from bowline.errors import UsageError

Matrix = npt.NDArray[np.float64]
CLOSE = pytest.approx
ENTRIES = st.floats(-4, 4, width=32).map(lambda x: round(x, 2))
SCALE_FREE = (
    geometry.mean_cosine,
    geometry.mean_squared_cosine,
    geometry.effective_rank,
    geometry.participation_ratio,
    geometry.frame_ratio,
    geometry.tight_frame_distance,
    geometry.identity_distance,
    geometry.self_decoding_rate,
    geometry.median_nearest_cosine,
)


def tables(min_side: int = 1) -> st.SearchStrategy[Matrix]:
    shapes = array_shapes(min_dims=2, max_dims=2, min_side=min_side, max_side=9)
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=ENTRIES))


def gaussian(rows: int, hidden_size: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).normal(size=(rows, hidden_size))


def pair_cosines(table: Matrix) -> Matrix:
    """The (V, V) cosines of the nonzero rows, NaN on the diagonal."""
    kept = table[np.linalg.norm(table, axis=1) > 0]
    unit = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    cosines: Matrix = unit @ unit.T
    np.fill_diagonal(cosines, np.nan)
    return cosines


def orthonormal(rows: int, hidden_size: int) -> Matrix:
    """Orthonormal rows, or orthonormal columns: a tight frame."""
    wide = np.linalg.qr(gaussian(max(rows, hidden_size), min(rows, hidden_size)))[0]
    return np.asarray(wide if rows >= hidden_size else wide.T)


# Against the definitions


@given(tables())
def test_the_norm_quantiles_are_those_of_the_rows(table: Matrix) -> None:
    norms = np.linalg.norm(table, axis=1)
    found = geometry.row_norm_quantiles(table)
    assert found is not None
    expected = [norms.min(), *np.quantile(norms, [0.05, 0.5, 0.95]), norms.max()]
    assert [found.min, found.p5, found.p50, found.p95, found.max] == CLOSE(expected)


@given(tables())
def test_the_means_over_cosines_are_those_of_all_pairs(table: Matrix) -> None:
    cosines = pair_cosines(table)
    if len(cosines) < 2:
        assert geometry.mean_cosine(table) is None
        assert geometry.mean_squared_cosine(table) is None
    else:
        assert geometry.mean_cosine(table) == CLOSE(np.nanmean(cosines), abs=1e-9)
        assert geometry.mean_squared_cosine(table) == CLOSE(np.nanmean(cosines**2), abs=1e-9)


@given(tables())
def test_the_identity_distance_is_the_least_over_the_scale(table: Matrix) -> None:
    gram = table @ table.T
    identity = np.eye(len(table))
    best = np.trace(gram) / max(np.sum(gram**2), 1e-300)
    distances = [np.linalg.norm(a * gram - identity) / math.sqrt(len(table)) for a in best * np.array([1, 0.99, 1.01])]
    assert geometry.identity_distance(table) == CLOSE(distances[0], abs=1e-6)
    assert distances[0] <= min(distances) + 1e-12
    bound = geometry.identity_bound(*table.shape)
    assert bound is not None
    assert distances[0] >= bound - 1e-9


@given(tables())
def test_the_frame_figures_are_those_of_the_eigenvalues(table: Matrix) -> None:
    gram = table.T @ table
    if not gram.any():
        assert geometry.frame_ratio(table) is None
        assert geometry.tight_frame_distance(table) is None
        assert geometry.participation_ratio(table) is None
        return
    size = table.shape[1]
    eigenvalues = np.linalg.eigvalsh(gram)
    ratio = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    tight = np.linalg.norm(gram * size / np.trace(gram) - np.eye(size)) / math.sqrt(size)
    assert geometry.participation_ratio(table) == CLOSE(ratio)
    assert geometry.frame_ratio(table) == CLOSE(size / ratio)
    assert geometry.tight_frame_distance(table) == CLOSE(tight, abs=1e-6)


@given(tables())
def test_the_effective_rank_is_the_entropy_of_the_singular_values(table: Matrix) -> None:
    values = np.linalg.svd(table, compute_uv=False)
    if not values.sum():
        assert geometry.effective_rank(table) is None
        return
    shares = values[values > 0] / values.sum()
    assert geometry.effective_rank(table) == CLOSE(np.exp(-np.sum(shares * np.log(shares))), rel=1e-5)


@pytest.mark.parametrize("shape", [(40, 7), (7, 7), (5, 12), (3, 1)])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_isotropy_is_the_ratio_of_partition_functions_over_both_signs(shape: tuple[int, int], scale: float) -> None:
    table = scale * gaussian(*shape)
    eigenvectors = np.linalg.svd(table, full_matrices=True)[2]
    z = np.exp(np.vstack([eigenvectors, -eigenvectors]) @ table.T).sum(axis=1)
    assert geometry.isotropy(table) == CLOSE(z.min() / z.max(), rel=1e-4)


def test_isotropy_counts_the_directions_that_no_row_has() -> None:
    # Along each of the three other eigenvectors, either way, Z is above its value 3 in the fourth dimension.
    coordinates = np.array([[2, 2, -1], [2, -1, 2], [-1, 2, 2]]) / 3 * [6.0, 6.5, 7.0]
    table = np.hstack([coordinates, np.zeros((3, 1))])
    largest = np.exp(np.vstack([coordinates.T, -coordinates.T])).sum(axis=1).max()
    assert geometry.isotropy(table) == CLOSE(3 / largest)


def test_isotropy_of_rows_too_long_for_exp_is_still_a_number() -> None:
    assert geometry.isotropy(1e6 * gaussian(50, 4)) == 0.0


@settings(max_examples=200)
@given(tables(), st.data())
def test_a_row_fails_to_decode_when_another_scores_more(table: Matrix, data: st.DataObject) -> None:
    queries = data.draw(st.none() | st.lists(st.integers(0, len(table) - 1), min_size=1, unique=True))
    asked = [i for i in (range(len(table)) if queries is None else sorted(queries)) if table[i].any()]
    # Entries have two decimals: scores of whole hundredths are compared without rounding.
    exact = np.rint(table * 100).astype(np.int64)
    scores = exact @ exact.T
    failing = [i for i in asked if scores[i].max() > scores[i, i]]
    assert geometry.self_decoding_failures(table, queries).tolist() == failing
    expected = 1 - len(failing) / len(asked) if asked else None
    assert geometry.self_decoding_rate(table, queries) == expected


@given(tables())
def test_the_nearest_row_has_the_largest_cosine(table: Matrix) -> None:
    neighbours, cosines = geometry.nearest_rows(table)
    norms = np.linalg.norm(table, axis=1)
    found = []
    for i, (j, cosine) in enumerate(zip(neighbours, cosines, strict=True)):
        others = [k for k in range(len(table)) if k != i and norms[k] > 0]
        if not others or norms[i] == 0:
            assert j == -1
            assert np.isnan(cosine)
            continue
        best = max(table[i] @ table[k] / norms[i] / norms[k] for k in others)
        assert cosine == CLOSE(best, abs=1e-5)
        assert table[i] @ table[j] / norms[i] / norms[j] == CLOSE(best, abs=1e-5)
        found.append(best)
    median = geometry.median_nearest_cosine(table)
    assert median == (CLOSE(np.median(found), abs=1e-5) if found else None)


def test_scores_in_many_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = gaussian(300, 3).astype(np.float32)
    whole = geometry.describe(table)
    failures = geometry.self_decoding_failures(table)
    monkeypatch.setattr(geometry.neighbours, "SCORE_ENTRIES", 1000)
    monkeypatch.setattr(geometry.rows, "BLOCK_ENTRIES", 100)
    assert 0 < failures.size < 300
    assert geometry.self_decoding_failures(table).tolist() == failures.tolist()
    blocked = geometry.describe(table)
    assert blocked.self_decoding_rate == whole.self_decoding_rate
    for name in ("mean_cosine", "mean_squared_cosine", "isotropy", "effective_rank", "participation_ratio"):
        assert getattr(blocked, name) == CLOSE(getattr(whole, name), abs=1e-6), name


# Tables whose figures are known


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


# Invariance


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


# Rows that cannot be used


def with_bad_rows(table: Matrix) -> Matrix:
    bad = np.zeros((len(table) + 4, table.shape[1]))
    bad[:4, 0] = (np.nan, np.inf, -np.inf, 1e200)
    bad[4:] = table
    return bad


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


# Reports, of a whole table and of a sample


@pytest.mark.parametrize("shape", [(200, 6), (6, 20)])
def test_a_report_on_a_whole_table_is_what_the_functions_say(shape: tuple[int, int]) -> None:
    table = gaussian(*shape)
    report = geometry.describe(table)
    assert report.sampled_rows is None
    assert report.queried_rows == shape[0]
    for figure in (*SCALE_FREE, geometry.isotropy, geometry.row_norm_quantiles):
        assert getattr(report, figure.__name__.replace("row_norm_quantiles", "row_norms")) == figure(table)
    assert report.welch_bound == geometry.welch_bound(*shape)
    assert report.identity_bound == geometry.identity_bound(*shape)


def test_a_report_goes_through_json() -> None:
    for table in (gaussian(50, 4), with_bad_rows(gaussian(3, 4)), np.zeros((0, 3))):
        report = geometry.describe(table).as_dict()
        assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_sample_is_uniform_seeded_and_within_its_budget() -> None:
    chosen = geometry.sample_rows(5000, 100, budget_bytes=400_000)
    again = geometry.sample_rows(5000, 100, budget_bytes=400_000)
    other = geometry.sample_rows(5000, 100, budget_bytes=400_000, seed=1)
    assert chosen is not None and again is not None and other is not None
    assert chosen.size == 1000
    assert np.all(np.diff(chosen) > 0)
    assert chosen[0] >= 0
    assert chosen[-1] < 5000
    assert chosen.tolist() == again.tolist() != other.tolist()
    assert chosen.mean() == CLOSE(2500, rel=0.1)


def test_a_table_that_fits_is_not_sampled() -> None:
    assert geometry.sample_rows(1000, 100, budget_bytes=400_000) is None
    assert geometry.sample_rows(0, 0) is None
    smallest = geometry.sample_rows(10, 1 << 20, budget_bytes=0)
    assert smallest is not None and smallest.size == 2


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="rows: expected a count, got -1"):
        geometry.sample_rows(-1, 4)


def test_a_report_says_that_it_is_of_a_sample() -> None:
    report = geometry.describe(gaussian(100, 4), rows=1000)
    assert (report.rows, report.sampled_rows, report.queried_rows) == (1000, 100, 100)
    assert report.welch_bound == geometry.welch_bound(1000, 4)
    assert report.identity_bound == geometry.identity_bound(1000, 4)


def test_a_sample_larger_than_its_table_is_refused() -> None:
    with pytest.raises(UsageError, match="rows: expected at least the 3 rows given, got 2"):
        geometry.describe(np.eye(3), rows=2)


@pytest.mark.parametrize("hidden_size", [50, 400])
def test_a_sample_estimates_the_figures_of_the_whole_table(hidden_size: int) -> None:
    # 250 rows: five for each dimension, then fewer than dimensions.
    table = gaussian(6000, hidden_size) * np.linspace(0.2, 2, hidden_size) + 0.1
    whole = geometry.describe(table)
    sums = {"participation_ratio": 0.0, "identity_distance": 0.0, "frame_ratio": 0.0, "mean_cosine": 0.0}
    sums["mean_squared_cosine"] = 0.0
    for seed in range(10):
        chosen = geometry.sample_rows(6000, hidden_size, budget_bytes=250 * hidden_size * 4, seed=seed)
        assert chosen is not None
        report = geometry.describe(table[chosen], rows=6000)
        for name in sums:
            sums[name] += getattr(report, name) / 10
    for name, value in sums.items():
        assert value == CLOSE(getattr(whole, name), rel=0.05), name
    # P of the sample as a table of its own falls short.
    alone = geometry.participation_ratio(table[:250])
    assert alone is not None and whole.participation_ratio is not None
    assert alone < 0.95 * whole.participation_ratio


def test_the_spectrum_is_not_claimed_from_fewer_than_two_rows_for_each_dimension() -> None:
    few = geometry.describe(gaussian(99, 50), rows=1000)
    assert (few.effective_rank, few.isotropy) == (None, None)
    enough = geometry.describe(gaussian(100, 50), rows=1000)
    assert enough.effective_rank == CLOSE(50, rel=0.08)
    assert enough.isotropy is not None


def test_the_seed_draws_the_queried_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry.report, "LEAST_QUERIES", 20)
    monkeypatch.setattr(geometry.report, "QUERY_PRODUCTS", 0)
    table = gaussian(500, 3)
    reports = [geometry.describe(table, seed=seed) for seed in (0, 0, 1)]
    assert reports[0] == reports[1] != reports[2]
    assert reports[0].queried_rows == 20


def test_memory_stays_far_below_v_by_v() -> None:
    table = np.random.default_rng(0).normal(size=(20_000, 64)).astype(np.float32)
    tracemalloc.start()
    geometry.describe(table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6 < 4 * 20_000**2
