"""Reports on a whole table and on a sample."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from bowline import geometry
from bowline.errors import UsageError
from tests.geometry.tables import CLOSE, SCALE_FREE, gaussian, with_bad_rows


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
    assert (report.rows, report.sampled_rows, report.queried_rows) == (1000, 100, 0)
    assert (report.self_decoding_rate, report.median_nearest_cosine) == (None, None)
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
    monkeypatch.setattr(geometry.diagnostics, "LEAST_QUERIES", 20)
    monkeypatch.setattr(geometry.diagnostics, "QUERY_PRODUCTS", 0)
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
