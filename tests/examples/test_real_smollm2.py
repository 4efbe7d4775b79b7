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


@pytest.mark.parametrize("vocab_size", [49_152, 49_153], ids=["even", "odd"])
def test_ten_steps_on_two_processes_are_those_of_one(vocab_size: int, smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text((ROOT / "docs" / "distributed.md").read_text(encoding="utf-8"), encoding="utf-8")
    given = ["--model", str(smollm2), "--text", str(text), "--vocab-size", str(vocab_size)]
    given += ["--steps", "10", "--rows", "4", "--length", "64", "--learning-rate", str(RATE)]
    expected = losses(alone("fsdp_loop", *given, "--out", str(tmp_path / "one")))
    assert len(expected) == 10
    for parallel in ("fsdp", "tp"):
        found = losses(together("fsdp_loop", *given, "--out", str(tmp_path / parallel), "--parallel", parallel))
        apart = max(abs(one - two) for one, two in zip(expected, found, strict=True))
        parameters = largest_difference(tmp_path / "one", tmp_path / parallel)
        assert apart < NEAR
        assert parameters < RATE
        assert not [finding for finding in audit(tmp_path / parallel).findings if finding.severity != "info"]
    moved = tensors(tmp_path / "one")["model.norm.weight"] - tensors(smollm2)["model.norm.weight"]
    assert moved.abs().max() > 5 * RATE
