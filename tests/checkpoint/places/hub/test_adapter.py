"""A PEFT adapter in a repository: audited by the command, and its base with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bowline.auditing import audit_adapter
from bowline.checkpoint.formats.numpy_writer import save_safetensors
from bowline.cli import app
from tests.checkpoint.loopback_hub import LoopbackHub, commit_of
from tests.checkpoints import LLAMA, table

COMMIT = commit_of("adapter")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    head = "base_model.model.lm_head"
    factors = {f"{head}.lora_A.weight": table(4, 8), f"{head}.lora_B.weight": table(64, 4)}
    layers = {f"base_model.model.layers.{at}.q_proj.lora_A.weight": np.ones((4, 8), np.float32) for at in range(20)}
    save_safetensors(tmp_path / "adapter.safetensors", {**factors, **layers})
    weights = (tmp_path / "adapter.safetensors").read_bytes()
    return {"adapter_config.json": json.dumps(CONFIG).encode(), "adapter_model.safetensors": weights}


def test_an_adapter_on_the_hub_is_audited_beside_a_base_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_safetensors(base / "model.safetensors", {"model.embed_tokens.weight": table()})
    (base / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    with LoopbackHub(branches={"main": COMMIT}, commits={COMMIT: files}) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        report = audit_adapter("org/name", base=base, select=["BW50"])
        requests = sum("range" in request.headers for request in hub.requests)
        result = CliRunner().invoke(app, ["audit", "org/name", "--base", str(base), "--select", "BW50"])
    assert report.evidence.location == f"org/name@{COMMIT}"
    assert [finding.code for finding in report.findings] == ["BW501"]
    assert requests < 12
    assert result.exit_code == 1
    assert "BW501 error" in result.output


def test_a_repository_that_is_neither_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackHub(branches={"main": COMMIT}, commits={COMMIT: {"README.md": b""}}) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        result = CliRunner().invoke(app, ["audit", "org/name"])
    assert result.exit_code == 2
    assert "no model here" in result.output
