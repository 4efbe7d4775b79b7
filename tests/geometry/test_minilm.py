"""A trained table: the word embeddings of all-MiniLM-L6-v2 (30522 x 384), and a random one of its shape."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bowline import geometry
from tests.geometry.tables import CLOSE, Matrix
from tests.geometry.test_isoscore import by_its_steps

UNUSED = np.r_[1:100, 104:999]
"""The rows of `[unused0]` to `[unused993]` in BERT's vocabulary."""


@pytest.fixture(scope="module")
def word_embeddings(minilm: Path) -> npt.NDArray[np.float32]:
    with (minilm / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))["embeddings.word_embeddings.weight"]
        start, end = entry["data_offsets"]
        file.seek(8 + length + start)
        assert entry["dtype"] == "F32"
        return np.frombuffer(file.read(end - start), dtype="<f4").reshape(entry["shape"])


@pytest.fixture(scope="module")
def report(word_embeddings: npt.NDArray[np.float32]) -> geometry.GeometryReport:
    return geometry.describe(word_embeddings)


@pytest.fixture(scope="module")
def singular(word_embeddings: npt.NDArray[np.float32]) -> tuple[Matrix, Matrix]:
    """The singular values, and the rows in the basis of the right singular vectors: (384,) and (30522, 384)."""
    table = word_embeddings.astype(np.float64)
    _, values, right = np.linalg.svd(np.linalg.qr(table, mode="r"))
    return values, table @ right.T


def test_the_spectrum_of_minilm_is_that_of_an_svd(
    report: geometry.GeometryReport, singular: tuple[Matrix, Matrix]
) -> None:
    values, coordinates = singular
    shares, energies = values / values.sum(), values**2
    participation = energies.sum() ** 2 / (energies**2).sum()
    z = np.exp(np.hstack([coordinates, -coordinates])).sum(axis=0)
    assert report.effective_rank == CLOSE(np.exp(-(shares * np.log(shares)).sum()))
    assert report.participation_ratio == CLOSE(participation)
    assert report.isotropy == CLOSE(z.min() / z.max(), rel=1e-5)
    tight = np.linalg.norm(energies / energies.mean() - 1) / np.sqrt(384)
    assert report.tight_frame_distance == CLOSE(tight)
    assert report.frame_ratio == CLOSE(384 / participation)


def test_how_far_e_e_t_of_minilm_is_from_the_identity(
    report: geometry.GeometryReport, singular: tuple[Matrix, Matrix]
) -> None:
    # In the basis of the left singular vectors E E^T is diagonal: 384 squares and 30138 zeros.
    diagonal = np.append(singular[0] ** 2, np.zeros(30522 - 384))

    def distance(a: float) -> float:
        return float(np.linalg.norm(a * diagonal - 1) / np.sqrt(30522))

    best = float(diagonal.sum() / (diagonal @ diagonal))
    assert report.identity_distance == CLOSE(distance(best), rel=1e-9)
    assert distance(best) < min(distance(0.99 * best), distance(1.01 * best))
    assert report.identity_bound == CLOSE(np.sqrt((30522 - 384) / 30522))


def test_the_cosines_of_minilm_are_those_of_its_pairs(
    word_embeddings: npt.NDArray[np.float32], report: geometry.GeometryReport
) -> None:
    unit = word_embeddings.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    pairs = 30522 * 30521
    assert report.mean_cosine == CLOSE((np.square(unit.sum(axis=0)).sum() - 30522) / pairs, rel=1e-9)
    assert report.mean_squared_cosine == CLOSE((np.square(unit.T @ unit).sum() - 30522) / pairs, rel=1e-9)
    some = unit[::20]
    among = some @ some.T
    off = ~np.eye(len(some), dtype=bool)
    assert geometry.mean_cosine(word_embeddings[::20]) == CLOSE(among[off].mean(), rel=1e-9)
    assert geometry.mean_squared_cosine(word_embeddings[::20]) == CLOSE(np.square(among[off]).mean(), rel=1e-9)


def test_the_isoscore_of_minilm_is_that_of_the_papers_steps(word_embeddings: npt.NDArray[np.float32]) -> None:
    found = geometry.isoscore(word_embeddings)
    assert found == CLOSE(by_its_steps(word_embeddings.astype(np.float64)), rel=1e-6)
    assert found == CLOSE(0.5324, abs=1e-4)


def test_the_figures_of_minilm(report: geometry.GeometryReport) -> None:
    assert (report.rows, report.hidden_size, report.sampled_rows) == (30522, 384, None)
    assert (report.left_out_rows, report.zero_rows) == (0, 0)
    norms = report.row_norms
    assert norms is not None
    assert [norms.min, norms.p5, norms.p50, norms.p95, norms.max] == CLOSE(
        [0.2449, 0.4679, 1.1110, 1.3441, 1.6940], abs=1e-4
    )
    assert report.mean_cosine == CLOSE(0.01806, abs=1e-5)
    assert report.mean_squared_cosine == CLOSE(0.008726, abs=1e-6)
    assert report.welch_bound == CLOSE(0.002571, abs=1e-6)
    assert report.isotropy == CLOSE(0.8434, abs=1e-4)
    assert report.effective_rank == CLOSE(351.53, abs=0.01)
    assert report.participation_ratio == CLOSE(198.02, abs=0.01)
    assert report.frame_ratio == CLOSE(1.9392, abs=1e-4)
    assert report.tight_frame_distance == CLOSE(0.9691, abs=1e-4)
    assert report.identity_distance == CLOSE(0.99675, abs=1e-5)
    assert report.identity_bound == CLOSE(0.99369, abs=1e-5)
    # Of a few hundred rows drawn: 99.94% and .564 of all rows.
    assert report.self_decoding_rate is not None and report.self_decoding_rate > 0.99
    assert report.median_nearest_cosine == CLOSE(0.564, abs=0.03)


def test_the_rows_of_minilm_that_decode_to_another(word_embeddings: npt.NDArray[np.float32]) -> None:
    failures = geometry.self_decoding_failures(word_embeddings)
    assert failures.size == 18
    assert 1 - failures.size / 30522 == CLOSE(0.9994, abs=1e-4)
    scores = word_embeddings[failures].astype(np.float64) @ word_embeddings.T.astype(np.float64)
    assert np.all(scores.max(axis=1) > scores[np.arange(18), failures])
    # And no other: in float64, over a part of the rows.
    asked = np.arange(0, 30522, 160)
    scores = word_embeddings[asked].astype(np.float64) @ word_embeddings.T.astype(np.float64)
    other = scores.max(axis=1) > scores[np.arange(asked.size), asked] + 1e-12
    assert asked[other].tolist() == np.intersect1d(asked, failures).tolist()


def test_the_nearest_rows_of_minilm(word_embeddings: npt.NDArray[np.float32]) -> None:
    queries = np.random.default_rng(0).choice(30522, size=2000, replace=False)
    assert geometry.median_nearest_cosine(word_embeddings, queries) == CLOSE(0.564, abs=0.015)


def test_rows_never_trained_are_short_and_alike(word_embeddings: npt.NDArray[np.float32]) -> None:
    unused = word_embeddings[UNUSED]
    norms = geometry.row_norm_quantiles(unused)
    assert norms is not None
    assert norms.p50 == CLOSE(0.455, abs=0.001)
    assert geometry.mean_cosine(unused) == CLOSE(0.82, abs=0.005)


def test_a_sample_of_minilm_comes_near_the_whole(word_embeddings: npt.NDArray[np.float32]) -> None:
    chosen = geometry.sample_rows(30522, 384, budget_bytes=6 << 20)
    assert chosen is not None
    report = geometry.describe(word_embeddings[chosen], rows=30522)
    assert geometry.isoscore(geometry.Rows(word_embeddings[chosen], total=30522)) == CLOSE(0.532, rel=0.03)
    assert report.sampled_rows == 4096
    assert report.participation_ratio == CLOSE(198.0, rel=0.03)
    assert report.effective_rank == CLOSE(351.5, rel=0.03)
    assert report.mean_squared_cosine == CLOSE(0.008726, rel=0.05)
    assert report.identity_distance == CLOSE(0.99675, abs=1e-4)


def test_the_figures_of_a_random_table_of_the_same_shape() -> None:
    table = np.random.default_rng(0).normal(0, 0.02, size=(30522, 384)).astype(np.float32)
    report = geometry.describe(table)
    assert report.isoscore == CLOSE(0.9875, abs=2e-4)
    norms = report.row_norms
    assert norms is not None
    assert [norms.p5, norms.p50, norms.p95] == CLOSE([0.369, 0.392, 0.415], abs=1e-3)
    assert report.mean_cosine == CLOSE(0, abs=1e-4)
    assert report.mean_squared_cosine == CLOSE(0.0026, abs=1e-4)
    assert report.isotropy == CLOSE(0.999, abs=1e-3)
    assert report.effective_rank == CLOSE(383.4, abs=0.1)
    assert report.participation_ratio == CLOSE(379.2, abs=0.2)
    assert report.frame_ratio == CLOSE(1.0127, abs=1e-3)
    assert report.tight_frame_distance == CLOSE(0.112, abs=1e-3)
    assert report.identity_distance == CLOSE(0.99377, abs=1e-5)
    assert report.self_decoding_rate == 1.0
    assert report.median_nearest_cosine == CLOSE(0.207, abs=0.005)
