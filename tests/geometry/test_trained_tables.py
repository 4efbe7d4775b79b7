"""The geometry of trained tables that are sampled, compared with float64 over all rows: SmolLM2's and MiniLM's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bowline import geometry
from bowline.auditing import audit

# Over all 49,152 x 49,152 pairs in float64: 5036 rows decode to themselves.
SMOLLM2_SELF_DECODING = 5036 / 49152
SMOLLM2_NEAREST_COSINE = 0.790414

Table = npt.NDArray[np.float32]


def read(path: Path, name: str) -> Table:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
    return np.memmap(path, np.float32, "r", 8 + length + entry["data_offsets"][0], tuple(entry["shape"]))


def in_float64(table: Table) -> dict[str, float]:
    """The figures of the Gram matrix and the mean cosine of all rows, in float64, without Bowline."""
    blocks = [table[at : at + 4096].astype(np.float64) for at in range(0, len(table), 4096)]
    gram = sum(block.T @ block for block in blocks)
    eigenvalues, vectors = np.linalg.eigh(gram)
    shares = np.sqrt(eigenvalues) / np.sqrt(eigenvalues).sum()
    z = np.zeros(2 * len(shares))
    for block in blocks:
        projections = block @ vectors
        z += np.exp(np.hstack([projections, -projections])).sum(axis=0)
    directions = sum((block / np.linalg.norm(block, axis=1, keepdims=True)).sum(axis=0) for block in blocks)
    return {
        "mean_cosine": float((directions @ directions - len(table)) / len(table) / (len(table) - 1)),
        "effective_rank": float(np.exp(-(shares @ np.log(shares)))),
        "isotropy": float(z.min() / z.max()),
        "participation_ratio": float(eigenvalues.sum() ** 2 / np.square(eigenvalues).sum()),
    }


def assert_near(report: geometry.GeometryReport, exact: dict[str, float]) -> None:
    """Each figure is within four standard errors, and exact if it has none."""
    errors = report.standard_errors
    assert errors is not None
    for name, value in exact.items():
        allowed = 4 * errors[name] if name in errors else 1e-9
        assert abs(getattr(report, name) - value) < allowed, (name, getattr(report, name), value)


def decoding_of(table: Table, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Whether these rows decode to themselves, and their largest cosine with another, in float64."""
    asked = table[rows].astype(np.float64)
    own = np.square(asked).sum(axis=1)
    decodes, nearest = np.ones(len(rows), np.bool_), np.full(len(rows), -1.0)
    for at in range(0, len(table), 4096):
        block = table[at : at + 4096].astype(np.float64)
        scores = asked @ block.T
        decodes &= scores.max(axis=1) <= own * (1 + 1e-13)
        cosines = scores / np.linalg.norm(block, axis=1) / np.sqrt(own)[:, None]
        inside = (rows >= at) & (rows < at + len(block))
        cosines[np.flatnonzero(inside), rows[inside] - at] = -1.0
        nearest = np.maximum(nearest, cosines.max(axis=1))
    return decodes, nearest


@pytest.mark.real
def test_the_audit_of_smollm2_agrees_with_all_rows_in_float64(smollm2: Path) -> None:
    table = read(smollm2 / "model.safetensors", "model.embed_tokens.weight")
    report = audit(smollm2).evidence.geometry
    assert report is not None
    assert (report.sampled_rows, report.queried_rows) == (7281, 1059)
    scores = {"self_decoding_rate": SMOLLM2_SELF_DECODING, "median_nearest_cosine": SMOLLM2_NEAREST_COSINE}
    assert_near(report, in_float64(table) | scores)
    assert report.standard_errors is not None
    assert report.standard_errors["self_decoding_rate"] < 0.01
    assert report.standard_errors["median_nearest_cosine"] < 0.005
    assert geometry.describe(table) == report  # one number, from a file and from memory


@pytest.mark.real
def test_rows_of_smollm2_are_compared_as_in_float64(smollm2: Path) -> None:
    table = read(smollm2 / "model.safetensors", "model.embed_tokens.weight")
    rows = np.sort(np.r_[5:17, np.random.default_rng(7).choice(49152, 100, replace=False)])  # 5 to 16 have copies
    decodes, nearest = decoding_of(table, rows)
    assert geometry.self_decoding_failures(table, rows).tolist() == np.unique(rows[~decodes]).tolist()
    assert geometry.nearest_rows(table, rows)[1] == pytest.approx(nearest, abs=1e-6)


def test_a_sampled_minilm_agrees_with_all_rows_in_float64(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry.diagnostics, "WHOLE_TABLE_BYTES", 32 << 20)
    monkeypatch.setattr(geometry.diagnostics, "SAMPLE_BYTES", 6 << 20)
    monkeypatch.setattr(geometry.diagnostics, "QUERY_PRODUCTS", 0)
    table = read(minilm / "model.safetensors", "embeddings.word_embeddings.weight")
    report = geometry.describe(table)
    assert (report.sampled_rows, report.queried_rows) == (4096, 512)
    assert_near(report, in_float64(table) | {"self_decoding_rate": 1 - 18 / 30522, "median_nearest_cosine": 0.564})
