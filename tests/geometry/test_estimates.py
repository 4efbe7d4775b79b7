"""Estimates for large tables: exact comparisons with all rows, no bias from sampling, and standard errors that hold."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bowline import geometry
from bowline.geometry.standard_errors import error_of_median, error_of_share
from tests.geometry.tables import CLOSE, Matrix, gaussian

GRAM_FIGURES = (
    "mean_squared_cosine",
    "isoscore",
    "isotropy",
    "effective_rank",
    "participation_ratio",
    "frame_ratio",
    "tight_frame_distance",
    "identity_distance",
)
SCORE_FIGURES = ("self_decoding_rate", "median_nearest_cosine")


def trained(rows: int = 3000, hidden_size: int = 24) -> npt.NDArray[np.float32]:
    """Rows of many lengths, some close to others, in a narrow cone: about half decode to themselves."""
    random = np.random.default_rng(3)
    centres = random.normal(size=(rows // 4, hidden_size)) * np.linspace(0.3, 1.5, hidden_size)
    table = centres[random.integers(0, len(centres), rows)] + 0.5 * random.normal(size=(rows, hidden_size)) + 0.5
    return (0.3 * table * random.uniform(0.5, 1.5, size=(rows, 1))).astype(np.float32)


def by_brute_force(table: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], Matrix]:
    """Whether each row decodes to itself, and its largest cosine with another, over V x V in float64."""
    wide = table.astype(np.float64)
    scores = wide @ wide.T
    decodes = scores.max(axis=1) <= np.diag(scores) * (1 + 1e-14)
    norms = np.sqrt(np.diag(scores))
    cosines = scores / norms / norms[:, None]
    np.fill_diagonal(cosines, -np.inf)
    return decodes, cosines.max(axis=1)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a table of 3000 x 24 count as large: 600 rows are sampled, 400 are compared with all."""
    monkeypatch.setattr(geometry.diagnostics, "WHOLE_TABLE_BYTES", 100_000)
    monkeypatch.setattr(geometry.diagnostics, "SAMPLE_BYTES", 600 * 24 * 4)
    monkeypatch.setattr(geometry.diagnostics, "LEAST_QUERIES", 400)
    monkeypatch.setattr(geometry.diagnostics, "QUERY_PRODUCTS", 0)


# --- self-decoding and nearest rows ---------------------------------------------------------------------------------


def test_queried_rows_compete_with_all_rows_and_not_with_a_sample(large: None) -> None:
    table = trained()
    decodes, cosines = by_brute_force(table)
    report = geometry.describe(table)
    assert (report.sampled_rows, report.queried_rows) == (600, 400)
    errors = report.standard_errors
    assert errors is not None
    assert abs(report.self_decoding_rate - decodes.mean()) < 4 * errors["self_decoding_rate"]
    nearest = report.median_nearest_cosine
    assert abs(nearest - np.median(cosines)) < 4 * errors["median_nearest_cosine"]  # type: ignore[operator]
    # Among the sampled rows alone, both figures are far away.
    among_themselves = by_brute_force(table[geometry.sample_rows(3000, 24, 600 * 24 * 4)])
    assert among_themselves[0].mean() - decodes.mean() > 4 * errors["self_decoding_rate"]
    assert np.median(cosines) - np.median(among_themselves[1]) > 4 * errors["median_nearest_cosine"]


def test_each_comparison_is_that_of_float64(large: None) -> None:
    table = trained()
    decodes, cosines = by_brute_force(table)
    queries = np.random.default_rng(0).permutation(3000)[:700]
    assert geometry.self_decoding_failures(table, queries).tolist() == sorted(queries[~decodes[queries]].tolist())
    assert geometry.nearest_rows(table, queries)[1] == CLOSE(cosines[queries], abs=1e-6)


def test_all_rows_are_compared_when_they_can_be(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry.diagnostics, "LEAST_QUERIES", 3000)
    table = trained()
    decodes, cosines = by_brute_force(table)
    report = geometry.describe(table)
    assert report.self_decoding_rate == CLOSE(decodes.mean(), abs=1e-12)
    assert report.median_nearest_cosine == CLOSE(np.median(cosines), abs=1e-6)
    assert report.standard_errors is not None
    assert not set(SCORE_FIGURES) & set(report.standard_errors)


def test_a_small_table_is_exact() -> None:
    assert geometry.describe(trained(500)).standard_errors is None


class Stored:
    """A table in a file: bfloat16 or float16 that is decoded in blocks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = (tensor.shape[0], tensor.shape[1])

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return self.tensor[start:stop].float().numpy()

    def take(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.tensor[torch.from_numpy(chosen)].float().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_table_has_one_report_wherever_it_is(large: None, tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(trained()).to(dtype)
    wide = tensor.float().numpy()
    report = geometry.describe(wide)
    assert geometry.describe(tensor) == report
    assert geometry.describe(Stored(tensor)) == report
    np.save(tmp_path / "table.npy", tensor.numpy() if dtype is not torch.bfloat16 else wide)
    assert geometry.describe(np.load(tmp_path / "table.npy", mmap_mode="r")) == report


def test_the_functions_read_a_stored_table_too() -> None:
    table = trained(300)
    stored = Stored(torch.from_numpy(table))
    assert geometry.self_decoding_rate(stored) == geometry.self_decoding_rate(table)
    assert geometry.nearest_rows(stored, [5, 3])[0].tolist() == geometry.nearest_rows(table, [5, 3])[0].tolist()
    assert geometry.effective_rank(geometry.Rows(stored)) == geometry.effective_rank(table)


def test_rows_that_cannot_be_used_are_counted_and_not_queried(large: None) -> None:
    table = trained()
    table[:2500:2] = 0
    table[1:2500:4] = np.nan
    report = geometry.describe(table)
    assert (report.left_out_rows, report.zero_rows, report.queried_rows) == (625, 1250, 400)
    kept = table[np.isfinite(table).all(axis=1)]
    assert report.mean_cosine == CLOSE(geometry.mean_cosine(table), rel=1e-9)
    assert report.row_norms is not None
    assert report.row_norms.p95 == CLOSE(np.quantile(np.linalg.norm(kept.astype(np.float64), axis=1), 0.95), rel=1e-9)
    decodes = by_brute_force(kept[np.abs(kept).sum(axis=1) > 0])[0].mean()
    assert report.standard_errors is not None and report.self_decoding_rate is not None
    assert abs(report.self_decoding_rate - decodes) < 4 * report.standard_errors["self_decoding_rate"]


def test_memory_does_not_grow_with_the_table(large: None, tmp_path: Path) -> None:
    table = np.lib.format.open_memmap(tmp_path / "table.npy", mode="w+", dtype=np.float16, shape=(300_000, 64))
    table[:] = np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float16)[np.arange(300_000) % 1000]
    tracemalloc.start()
    report = geometry.describe(np.load(tmp_path / "table.npy", mmap_mode="r"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.self_decoding_rate is not None
    assert peak < 70e6 < 4 * table.size


# --- figures from a sample ------------------------------------------------------------------------------------------


def test_sampling_biases_no_figure_and_the_standard_errors_hold(large: None) -> None:
    table = trained()
    decodes, cosines = by_brute_force(table)
    exact = {name: getattr(geometry, name)(table.astype(np.float64)) for name in GRAM_FIGURES}
    exact |= {"self_decoding_rate": decodes.mean(), "median_nearest_cosine": np.median(cosines)}
    reports = [geometry.describe(table, seed=seed) for seed in range(60)]
    for name, value in exact.items():
        off = np.array([(getattr(report, name) - value) / (report.standard_errors or {})[name] for report in reports])
        assert abs(off.mean()) < 0.6, (name, off.mean())
        assert 0.7 < np.sqrt(np.square(off).mean()) < 1.35, (name, np.sqrt(np.square(off).mean()))
    assert all(report.mean_cosine == CLOSE(geometry.mean_cosine(table), rel=1e-9) for report in reports)
    norms = np.quantile(np.linalg.norm(table.astype(np.float64), axis=1), [0, 0.05, 0.5, 0.95, 1])
    for report in reports:
        found = report.row_norms
        assert found is not None
        assert [found.min, found.p5, found.p50, found.p95, found.max] == CLOSE(norms.tolist(), rel=1e-9)


@pytest.mark.parametrize("per_dimension", [2, 4, 12])
def test_the_effective_rank_of_a_sample_is_corrected(per_dimension: int) -> None:
    table = gaussian(20_000, 40) * np.linspace(0.2, 1.5, 40)
    values = np.linalg.svd(table, compute_uv=False)
    shares = values / values.sum()
    exact = float(np.exp(-(shares @ np.log(shares))))
    found, plain = [], []
    for seed in range(20):
        chosen = np.sort(np.random.default_rng(seed).choice(20_000, 40 * per_dimension, replace=False))
        found.append(geometry.effective_rank(geometry.Rows(table[chosen], total=20_000)))
        plain.append(geometry.effective_rank(table[chosen]))
    assert abs(np.mean(found) - exact) < 0.12 * (exact - np.mean(plain))  # type: ignore[arg-type]


def test_a_callers_sample_has_standard_errors_too() -> None:
    table = trained()
    exact = geometry.describe(table)
    off = []
    for seed in range(40):
        chosen = np.sort(np.random.default_rng(seed).choice(3000, 600, replace=False))
        report = geometry.describe(table[chosen], rows=3000)
        assert report.standard_errors is not None
        assert set(report.standard_errors) == {"mean_cosine", *GRAM_FIGURES}
        off.append((report.mean_cosine - exact.mean_cosine) / report.standard_errors["mean_cosine"])  # type: ignore[operator]
    assert 0.7 < np.std(off) < 1.35


def test_the_standard_errors_of_a_share_and_of_a_median_are_those_of_repeated_draws() -> None:
    random = np.random.default_rng(0)
    whole = random.exponential(size=5000)
    hits = whole > 2.0
    shares, medians, of_share, of_median = [], [], [], []
    for _ in range(400):
        drawn = random.choice(5000, 1000, replace=False)
        shares.append(hits[drawn].mean())
        medians.append(np.median(whole[drawn]))
        of_share.append(error_of_share(int(hits[drawn].sum()), 1000, 5000))
        of_median.append(error_of_median(whole[drawn], 5000))
    assert np.mean(of_share) == CLOSE(np.std(shares), rel=0.12)
    assert np.mean(of_median) == CLOSE(np.std(medians), rel=0.15)
    assert error_of_share(1000, 1000, 5000) > 0
