"""Checkpoints whose config and tensors do not fit each other: refused by name, before a file is written."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

from bowline.checkpoint import open_checkpoint
from bowline.errors import BowlineError
from bowline.export.gguf import export_gguf
from tests.export.gguf_models import made

pytestmark = pytest.mark.usefixtures("quiet_transformers")

Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    places: dict[str, Path] = {}

    def place_of(name: str) -> Path:
        if name not in places:
            places[name] = tmp_path_factory.mktemp("model")
            made(name, places[name])
        return places[name]

    return place_of


def damaged(source: Path, place: Path, config: Mapping[str, Any], change: Change | None = None) -> Path:
    """A copy of a checkpoint with other settings and tensors."""
    shutil.copytree(source, place)
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = load_file(place / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def refused(source: Path, tmp_path: Path, seen: str, config: Mapping[str, Any], change: Change | None = None) -> None:
    place = damaged(source, tmp_path / "damaged", config, change)
    (tmp_path / "out").mkdir()
    with pytest.raises(BowlineError, match=seen) as raised:
        export_gguf(place, tmp_path / "out" / "model.gguf")
    assert raised.value.help
    assert list((tmp_path / "out").iterdir()) == []


WRONG_SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "Llama, tied",
        r"becomes token_embd.weight with the shape \(\d+, 64\), by config.json it has",
        {"hidden_size": 48},
    ),
    ("Llama, tied", "layers.1.*would become blk.1.attn_norm.weight", {"num_hidden_layers": 1}),
    ("Llama, tied", r"no tensor becomes blk.2.attn_norm.weight of shape \(64,\)", {"num_hidden_layers": 3}),
    ("Llama, tied", "no tensor becomes blk.2", {"num_hidden_layers": 2_000_000_000}),
    (
        "Llama, tied",
        r"blk.0.attn_q.weight with the shape \(64, 64\), by config.json it has \(128, 64\)",
        {"head_dim": 32},
    ),
    ("Llama, tied", "num_key_value_heads is 3, expected a divisor of the 4 heads", {"num_key_value_heads": 3}),
    ("Llama, tied", "num_key_value_heads is 0", {"num_key_value_heads": 0}),
    ("Llama, tied", "no tensor becomes blk.0.attn_q.bias", {"attention_bias": True}),
    ("Llama, tied", "attention_bias is 'no', expected true or false", {"attention_bias": "no"}),
    ("Llama, tied", "rms_norm_eps is -1.0, expected a finite number from 0", {"rms_norm_eps": -1.0}),
    ("Llama, tied", "rms_norm_eps is null", {"rms_norm_eps": None}),
    ("Llama, tied", "rms_norm_eps is nan", {"rms_norm_eps": math.nan}),
    ("Llama, tied", "max_position_embeddings is 1099511627776", {"max_position_embeddings": 1 << 40}),
    ("Llama, tied", "rope_scaling is 'linear', expected an object or null", {"rope_scaling": "linear"}),
    ("Llama, tied", "rope_theta is -5, expected a positive number", {"rope_parameters": {"rope_theta": -5}}),
    ("Llama, tied", "rope_theta is 0, expected a positive number", {"rope_parameters": {"rope_theta": 0}}),
    ("Llama, tied", "factor is -2", {"rope_parameters": {"rope_type": "linear", "factor": -2}}),
    ("Llama, tied", "factor is null", {"rope_parameters": {"rope_type": "linear"}}),
    ("Llama, tied", "factor is -2", {"rope_scaling": {"rope_type": "linear", "factor": -2}}),
    ("Llama, tied", "factor is null", {"rope_parameters": {"rope_type": "llama3"}}),
    ("Llama, tied", "partial_rotary_factor is 0.5, expected 1", {"partial_rotary_factor": 0.5}),
    ("Qwen 2, tied", "scaled by 'llama3', expected none or linear", {"rope_parameters": {"rope_type": "llama3"}}),
    ("Qwen 2, tied", "4 heads of 32 features, expected 64 together", {"head_dim": 32}),
    ("Qwen 3, tied", "attention_bias is true, expected false", {"attention_bias": True}),
    ("Gemma 2, tied", "query_pre_attn_scalar is nan, expected a positive number", {"query_pre_attn_scalar": math.nan}),
    ("Gemma 2, tied", "query_pre_attn_scalar is true", {"query_pre_attn_scalar": True}),
    ("Gemma 2, tied", "attn_logit_softcapping is 0", {"attn_logit_softcapping": 0}),
    ("Gemma 3, tied", "final_logit_softcapping is 0, expected a positive number", {"final_logit_softcapping": 0}),
    ("Gemma 3, tied", "layer_types is 'full'", {"layer_types": "full"}),
    (
        "Gemma 3, tied",
        "sliding_attention is 'x', expected an object",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": "x"}},
    ),
    (
        "Gemma 3, tied",
        "layers with a window is scaled by 'linear'",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"type": "linear", "factor": 8.0}}},
    ),
    ("T5, tied and scaled", "no tensor becomes enc.blk.2", {"num_layers": 3}),
    ("T5, tied and scaled", "would become dec.blk.1", {"num_decoder_layers": 1}),
    ("T5, tied and scaled", "no tensor becomes enc.blk.0.ffn_gate.weight", {"feed_forward_proj": "gated-gelu"}),
    ("T5, tied", "ffn_gate.weight, which llama.cpp does not read", {"feed_forward_proj": "relu"}),
    ("T5, tied and scaled", "relative_attention_num_buckets is 0", {"relative_attention_num_buckets": 0}),
    (
        "T5, tied and scaled",
        r"enc.blk.0.attn_rel_b.weight with the shape \(32, 4\), by config.json it has \(16, 4\)",
        {"relative_attention_num_buckets": 16},
    ),
    ("T5, tied and scaled", "by config.json it has", {"d_kv": 8}),
    ("T5, tied and scaled", "n_positions is 'x', expected a whole number", {"n_positions": "x"}),
    ("T5, tied and scaled", "layer_norm_epsilon is null", {"layer_norm_epsilon": None}),
    ("GPT-2, tied", "n_inner is 0", {"n_inner": 0}),
    ("GPT-2, tied", r"by config.json it has \(5, 64\)", {"n_inner": 5}),
    ("GPT-2, tied", "n_head is 3, expected a divisor of n_embd, 64", {"n_head": 3}),
    ("GPT-2, tied", "position_embd.weight with the shape", {"n_positions": 8}),
]


@pytest.mark.parametrize(("model", "seen", "config"), WRONG_SETTINGS)
def test_a_config_that_does_not_fit_the_tensors_is_refused(
    models: Callable[[str], Path], tmp_path: Path, model: str, seen: str, config: dict[str, Any]
) -> None:
    refused(models(model), tmp_path, seen, config)


UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
SECOND_BIAS = BIAS.replace("block.0", "block.1")
WRONG_TENSORS: list[tuple[str, str, Change]] = [
    ("Llama, tied", r"no tensor becomes blk.1.ffn_up.weight of shape \(96, 64\)", lambda t: t.pop(UP)),
    ("Llama, tied", "no tensor becomes output_norm.weight", lambda t: t.pop("model.norm.weight")),
    ("Llama, tied", r"with the shape \(92, 64\)", lambda t: t.update({UP: t[UP][:-4].clone()})),
    ("Llama, tied", r"with the shape \(1, 96, 64\)", lambda t: t.update({UP: t[UP][None]})),
    ("Llama, tied", r"with the shape \(0, 64\)", lambda t: t.update({UP: t[UP][:0].clone()})),
    ("Llama, tied", r"with the shape \(\)", lambda t: t.update({"model.norm.weight": torch.tensor(1.0)})),
    ("Llama, tied", "would become blk.7", lambda t: t.update({UP.replace("1", "7"): t[UP].clone()})),
    ("Llama, tied", r"would become blk\.01", lambda t: t.update({UP.replace("1", "01"): t[UP].clone()})),
    ("Llama, untied", "would become output.bias", lambda t: t.update({"lm_head.bias": torch.zeros(3)})),
    ("Llama, tied", r"stored as I8, expected F32.*\(help: export", lambda t: t.update({UP: t[UP].to(torch.int8)})),
    ("Llama, tied", "stored as F8_E4M3", lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})),
    ("Llama, tied", r"stored as F64.*\(help: `bowline cast", lambda t: t.update({UP: t[UP].double()})),
    ("T5, tied and scaled", "no tensor becomes enc.blk.0.attn_rel_b.weight", lambda t: t.pop(BIAS)),
    ("T5, tied and scaled", "would become enc.blk.1.attn_rel_b", lambda t: t.update({SECOND_BIAS: t[BIAS].clone()})),
]


@pytest.mark.parametrize(("model", "seen", "change"), WRONG_TENSORS)
def test_tensors_that_llama_cpp_would_not_load_are_refused(
    models: Callable[[str], Path], tmp_path: Path, model: str, seen: str, change: Change
) -> None:
    refused(models(model), tmp_path, seen, {}, change)


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("copy", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_a_copy_that_differs_in_one_row_is_refused(
    models: Callable[[str], Path], tmp_path: Path, copy: str, value: float
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[copy] = tensors["shared.weight"].clone()
        tensors[copy][3] = value

    refused(models("T5, tied and scaled"), tmp_path, f"{copy} and shared.weight differ", {}, change)


def test_a_chat_template_that_is_not_utf_8_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    place = damaged(models("Llama, tied"), tmp_path / "model", {})
    (place / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(BowlineError, match=r"chat_template\.jinja: .* at byte 1, expected UTF-8"):
        export_gguf(place, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_directory_whose_name_is_not_utf_8_is_exported(models: Callable[[str], Path], tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    damaged(models("Llama, tied"), place, {})
    export_gguf(place, tmp_path / "model.gguf")
    assert "a�".encode() in (tmp_path / "model.gguf").read_bytes()[:1000]


def test_an_interrupted_export_leaves_nothing(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    place = damaged(models("Llama, tied"), tmp_path / "model", {})
    (tmp_path / "out").mkdir()
    for name in ("_write_parts", "verify", "audit"):
        with monkeypatch.context() as patch:
            patch.setattr(f"bowline.edit.commit.{name}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                export_gguf(place, tmp_path / "out" / "model.gguf")
        assert list((tmp_path / "out").iterdir()) == []


# --- the same numbers as transformers --------------------------------------------------------------------------------


def written(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the keys of a GGUF file."""
    with open_checkpoint(file) as checkpoint:
        assert checkpoint.gguf is not None
        return {name: np.array(checkpoint.rows(name)) for name in checkpoint.tensors}, dict(checkpoint.gguf.values)


THREE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FREQUENCIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama, tied", {"rope_parameters": None}),
    ("Llama, tied", {"rope_parameters": None, "rope_theta": 500.0}),
    ("Llama, tied", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0}),
    ("Llama, tied", {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0}),
    ("Llama, tied", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    ("Llama, tied", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("Llama, tied", {"rope_parameters": {**THREE, "original_max_position_embeddings": 16}}),
    ("Llama, tied", {"rope_parameters": THREE}),
    ("Llama, tied", {"rope_parameters": THREE, "original_max_position_embeddings": 24}),
    ("Gemma 3, other layers with a window", {"rope_parameters": None}),
    (
        "Gemma 3, other layers with a window",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_local_base_freq": 300.0},
    ),
    (
        "Gemma 3, other layers with a window",
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    (
        "Gemma 3, other layers with a window",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 2e5},
    ),
    (
        "Gemma 3, other layers with a window",
        {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 77.0}}},
    ),
]


@pytest.mark.parametrize(("model", "config"), FREQUENCIES)
def test_rotary_frequencies_are_those_of_transformers(
    models: Callable[[str], Path], tmp_path: Path, model: str, config: dict[str, Any]
) -> None:
    place = damaged(models(model), tmp_path / "model", config)
    export_gguf(place, tmp_path / "model.gguf")
    tensors, keys = written(tmp_path / "model.gguf")
    name = keys["general.architecture"]
    rotary = AutoModelForCausalLM.from_pretrained(place).model.rotary_emb
    size = keys.get(f"{name}.attention.key_length", 16)
    powers = np.arange(0, size, 2) / size
    wide = 1 / keys[f"{name}.rope.freq_base"] ** powers / keys.get(f"{name}.rope.scaling.factor", 1.0)
    wide /= tensors.get("rope_freqs.weight", 1.0)
    if name == "gemma3":
        near = 1 / keys["gemma3.rope.freq_base_swa"] ** powers
        assert near == pytest.approx(rotary.sliding_attention_inv_freq.numpy(), rel=1e-5)
        assert wide == pytest.approx(rotary.full_attention_inv_freq.numpy(), rel=1e-5)
    else:
        assert wide == pytest.approx(rotary.inv_freq.numpy(), rel=1e-5)


FLAGS: list[dict[str, Any]] = [
    {"tie_word_embeddings": flag} | scale
    for flag in (True, False, "absent")
    for scale in (
        {},
        {"scale_decoder_outputs": True},
        {"scale_decoder_outputs": False},
        {"scale_decoder_outputs": None},
    )
]


@pytest.mark.parametrize("name", ["T5, tied and scaled", "T5 with words, tied and scaled"])  # 48 and 64 features
@pytest.mark.parametrize("config", FLAGS)
def test_the_scale_of_a_t5s_logits_is_that_of_transformers(
    models: Callable[[str], Path], tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    place = damaged(models(name), tmp_path / "model", config)
    if config["tie_word_embeddings"] == "absent":
        path = place / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if v != "absent"}))
    export_gguf(place, tmp_path / "model.gguf")
    tensors, _ = written(tmp_path / "model.gguf")
    model = T5ForConditionalGeneration.from_pretrained(place).double().eval()
    seen: list[torch.Tensor] = []
    model.decoder.final_layer_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.tensor([[5, 9, 4, 1]])
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=ids).logits[0].numpy()
    states = seen[0][0].numpy()
    roots = np.sqrt((states**2).mean(-1, keepdims=True) + model.config.layer_norm_epsilon)
    norm = tensors["dec.output_norm.weight"].astype(np.float64)
    head = tensors.get("output.weight", tensors["token_embd.weight"]).astype(np.float64)
    assert (states / roots * norm) @ head.T == pytest.approx(logits, rel=3e-7, abs=1e-7 * np.abs(logits).max())
