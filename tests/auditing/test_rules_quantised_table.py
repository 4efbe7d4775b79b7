"""BW116, an int8 table that `quantize_tied` made of both ends of a tie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bowline import audit
from bowline.auditing import Severity
from bowline.nn import quantize_tied, save_checkpoint
from tests.checkpoints import codes, one, tied_gpt2

HEAD, WTE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny Llama, quantised and saved."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    quantize_tied(model)
    save_checkpoint(model, tmp_path / "model")
    return tmp_path / "model"


def fates(place: Path) -> dict[str, str | None]:
    outcomes = audit(place).evidence.outcomes
    return {loader: None if (one := targets[HEAD]) is None else str(one.fate) for loader, targets in outcomes.items()}


def test_bw116_a_saved_table_is_named_with_the_loader_that_reads_it(saved: Path) -> None:
    found = one(saved, "BW116")
    assert found.severity is Severity.INFO
    assert (
        found.message
        == f"model.embed_tokens.table is an int8 table that quantize_tied made of {WTE}, and serves {HEAD} too"
    )
    assert "load_checkpoint" in found.help
    assert found.tensors == ("model.embed_tokens.table.values", "model.embed_tokens.table.scale")
    assert "BW106" not in codes(saved)
    assert set(fates(saved).values()) == {"refused"}


def test_bw116_warns_where_the_config_does_not_name_the_table(saved: Path) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    found = one(saved, "BW116")
    assert found.severity is Severity.WARNING
    assert "config.json does not name it" in found.message
    assert fates(saved)["transformers-5"] == "random"


def test_bw116_is_not_said_of_a_float_matrix(tmp_path: Path) -> None:
    assert "BW116" not in codes(tied_gpt2(tmp_path))
