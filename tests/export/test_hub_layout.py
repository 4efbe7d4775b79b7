"""Checkpoints for transformers and mlx-lm, with their ties settled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bowline.errors import BowlineError
from bowline.export.hub_layout import export_layout
from tests.checkpoints import GPT2, HEAD, OWN, WIDTH, WTE, config, table, write

SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
LLAMA = config("LlamaForCausalLM", "llama") | SIZES
EMBEDDING = "model.embed_tokens.weight"


def flag(place: Path) -> object:
    return json.loads((place / "config.json").read_text()).get("tie_word_embeddings")


def names(place: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(place / "model.safetensors", "numpy") as file:
        return set(file.keys())


@pytest.mark.parametrize("to", ["hf", "mlx"])
def test_a_redundant_head_is_left_out_and_the_flag_is_written(tmp_path: Path, to: str) -> None:
    source = write(tmp_path / "model", {EMBEDDING: table(), HEAD: table()}, {**LLAMA, "tie_word_embeddings": True})
    report = export_layout(source, tmp_path / "out", to=to)  # type: ignore[arg-type]
    assert names(tmp_path / "out") == {EMBEDDING}
    assert flag(tmp_path / "out") is True
    assert "is tied" in report.checked[0]


def test_a_trained_head_under_an_absent_flag_gets_the_flag_that_mlx_lm_needs(tmp_path: Path) -> None:
    """In mlx-lm an absent flag of a Llama is true: it would drop the head, which transformers 5 keeps."""
    source = write(tmp_path / "model", {EMBEDDING: table(), HEAD: OWN}, LLAMA)
    report = export_layout(source, tmp_path / "out", to="mlx")
    assert names(tmp_path / "out") == {EMBEDDING, HEAD}
    assert flag(tmp_path / "out") is False
    assert "mlx-lm: lm_head.weight is kept" in report.checked[0]


def test_a_head_that_mlx_lms_class_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, {**GPT2, "tie_word_embeddings": False})
    with pytest.raises(BowlineError, match=r"mlx-lm: lm_head.weight would be"):
        export_layout(source, tmp_path / "out", to="mlx")
    assert not (tmp_path / "out").exists()
    assert export_layout(source, tmp_path / "out", to="hf").clean


def test_a_class_that_mlx_lm_does_not_know_is_refused(tmp_path: Path) -> None:
    bert = config("BertForMaskedLM", "bert", tie_word_embeddings=True)
    source = write(tmp_path / "model", {"bert.embeddings.word_embeddings.weight": table()}, bert)
    with pytest.raises(BowlineError, match="mlx-lm"):
        export_layout(source, tmp_path / "out", to="mlx")


def test_a_base_whose_head_would_be_random_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model", {EMBEDDING: table()}, {**LLAMA, "tie_word_embeddings": False})
    with pytest.raises(BowlineError, match="it is not known whether the two ends are one matrix"):
        export_layout(source, tmp_path / "out", to="hf")
