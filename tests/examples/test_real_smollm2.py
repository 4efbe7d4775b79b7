"""The plain training loop on SmolLM2-135M-Instruct: ten steps of FSDP2 and of tensor parallelism are one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bowline.auditing import audit
from tests.examples.runs import alone, largest_difference, losses, tensors, together
from tests.torchrun import ROOT

pytest.importorskip("transformers")
WITH_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [pytest.mark.real, pytest.mark.skipif(not WITH_GLOO, reason="this torch has no gloo")]
RATE = 1e-5
NEAR = 1e-5
"""Of losses between 3 and 6, in float32."""


@pytest.fixture(scope="module", params=[49_152, 49_153], ids=["even", "odd"])
def given(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of every run of ten steps with this vocabulary, without `--out`."""
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_text((ROOT / "docs" / "distributed.md").read_text(encoding="utf-8"), encoding="utf-8")
    options = ["--model", str(smollm2), "--text", str(text), "--vocab-size", str(request.param)]
    return [*options, "--steps", "10", "--rows", "4", "--length", "64", "--learning-rate", str(RATE)]


@pytest.fixture(scope="module")
def one_process(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """What one process saved, and its losses."""
    saved = tmp_path_factory.mktemp("one") / "model"
    return saved, losses(alone("fsdp_loop", *given, "--out", str(saved)))


def test_one_process_learns(smollm2: Path, one_process: tuple[Path, list[float]]) -> None:
    saved, found = one_process
    assert len(found) == 10
    moved = tensors(saved)["model.norm.weight"] - tensors(smollm2)["model.norm.weight"]
    assert moved.abs().max() > 5 * RATE


@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_ten_steps_on_two_processes_are_those_of_one(
    parallel: str, given: list[str], one_process: tuple[Path, list[float]], tmp_path: Path
) -> None:
    saved, expected = one_process
    found = losses(together("fsdp_loop", *given, "--out", str(tmp_path / "model"), "--parallel", parallel))
    assert found == pytest.approx(expected, abs=NEAR)
    assert largest_difference(saved, tmp_path / "model") < RATE
    assert not [finding for finding in audit(tmp_path / "model").findings if finding.severity != "info"]
