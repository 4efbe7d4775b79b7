"""A trained table: the word embeddings of all-MiniLM-L6-v2 (30522 x 384), and a random one of its shape."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bowline import geometry

CLOSE = pytest.approx
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


def test_the_report_on_minilm(word_embeddings: npt.NDArray[np.float32]) -> None:
    report = geometry.describe(word_embeddings)
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
    assert report.sampled_rows == 4096
    assert report.participation_ratio == CLOSE(198.0, rel=0.03)
    assert report.effective_rank == CLOSE(351.5, rel=0.03)
    assert report.mean_squared_cosine == CLOSE(0.008726, rel=0.05)
    assert report.identity_distance == CLOSE(0.99675, abs=1e-4)


def test_the_report_on_a_random_table_of_the_same_shape() -> None:
    table = np.random.default_rng(0).normal(0, 0.02, size=(30522, 384)).astype(np.float32)
    report = geometry.describe(table)
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
