"""Every diagnostic agrees with its definition, written out over V x V."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline import geometry
from tests.geometry.tables import CLOSE, Matrix, gaussian, pair_cosines, tables


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
    monkeypatch.setattr(geometry.usable_rows, "BLOCK_ENTRIES", 100)
    assert 0 < failures.size < 300
    assert geometry.self_decoding_failures(table).tolist() == failures.tolist()
    blocked = geometry.describe(table)
    assert blocked.self_decoding_rate == whole.self_decoding_rate
    for name in ("mean_cosine", "mean_squared_cosine", "isotropy", "effective_rank", "participation_ratio"):
        assert getattr(blocked, name) == CLOSE(getattr(whole, name), abs=1e-6), name
