"""Checkpoints as GGUF: the rows, the keys and the tie, against loops over the live model."""

from __future__ import annotations

import copy
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bowline.auditing import audit
from bowline.checkpoint import open_checkpoint
from bowline.errors import BowlineError, CheckpointError, TieError
from bowline.export.gguf import export_gguf
from bowline.export.gguf.gguf_classes import architecture_for
from bowline.export.gguf.rotary_scaling import rope_factors
from tests.export.gguf_models import MODELS, ROWS, TOKENIZER, made

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def exported(
    name: str, tmp_path: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model, and the tensors and keys of its GGUF file."""
    model = made(name, tmp_path / "model", dtype)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.gguf is not None
        tensors = {one: np.array(checkpoint.rows(one)) for one in checkpoint.tensors}
        return model, tensors, dict(checkpoint.gguf.values)


@pytest.mark.parametrize("name", MODELS)
def test_a_tied_model_gets_one_matrix_and_an_untied_one_two(name: str, tmp_path: Path) -> None:
    model, tensors, _ = exported(name, tmp_path)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # what is shared counts once
    assert ("output.weight" in tensors) is ("untied" in name)
    assert np.array_equal(tensors["token_embd.weight"], model.get_input_embeddings().weight.detach().numpy())
    if "untied" in name:
        assert np.array_equal(tensors["output.weight"], model.get_output_embeddings().weight.detach().numpy())
    extra = len(tensors.get("rope_freqs.weight", ()))
    assert sum(one.size for one in tensors.values()) == parameters + extra
    assert audit(tmp_path / "model.gguf").clean


def test_queries_and_keys_are_in_the_order_of_interleaved_rotations(tmp_path: Path) -> None:
    """llama.cpp rotates rows 2i and 2i + 1 of a head together, transformers rows i and i + half."""
    model, tensors, _ = exported("Llama, tied", tmp_path)
    attention = model.model.layers[1].self_attn
    for name, heads in (("q", 4), ("k", 2)):
        ours = getattr(attention, f"{name}_proj").weight.detach().numpy()
        theirs = tensors[f"blk.1.attn_{name}.weight"]
        size = len(ours) // heads
        for head in range(heads):
            for pair in range(size // 2):
                at = head * size
                assert np.array_equal(theirs[at + 2 * pair], ours[at + pair])
                assert np.array_equal(theirs[at + 2 * pair + 1], ours[at + size // 2 + pair])


def test_the_transposed_layers_of_gpt2_are_turned(tmp_path: Path) -> None:
    model, tensors, _ = exported("GPT-2, tied", tmp_path)
    block = model.transformer.h[0]
    for name, module in (
        ("attn_qkv", block.attn.c_attn),
        ("attn_output", block.attn.c_proj),
        ("ffn_up", block.mlp.c_fc),
    ):
        assert np.array_equal(tensors[f"blk.0.{name}.weight"], module.weight.detach().numpy().T)
        assert np.array_equal(tensors[f"blk.0.{name}.bias"], module.bias.detach().numpy())


def test_llama_3s_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    model, tensors, values = exported("Llama 3's frequencies", tmp_path)
    plain = 1.0 / values["llama.rope.freq_base"] ** (np.arange(0, 16, 2) / 16)
    assert np.allclose(plain / tensors["rope_freqs.weight"], model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "file_type"), [(torch.bfloat16, 32), (torch.float16, 1), (torch.float32, 0)])
def test_matrices_keep_their_dtype_and_vectors_become_float32(
    tmp_path: Path, dtype: torch.dtype, file_type: int
) -> None:
    made("Llama, tied", tmp_path / "model", dtype)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.gguf is not None
        kinds = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        assert checkpoint.gguf.values["general.file_type"] == file_type
    short = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert kinds["token_embd.weight"] == kinds["blk.0.ffn_up.weight"] == short
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"


def test_the_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    _, _, values = exported("Llama, tied", tmp_path)
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["tokenizer.ggml.bos_token_id"] == 0
    assert values["tokenizer.ggml.tokens"].length == values["tokenizer.ggml.token_type"].length == ROWS
    assert values["tokenizer.ggml.merges"].length == len(json.loads(TOKENIZER)["model"]["merges"])


def test_gemmas_norms_are_written_with_the_one_that_transformers_adds(tmp_path: Path) -> None:
    model, tensors, _ = exported("Gemma 3, tied", tmp_path, torch.bfloat16)
    layer = model.model.layers[1]
    for name, module in (
        ("blk.1.attn_norm", layer.input_layernorm),
        ("blk.1.post_attention_norm", layer.post_attention_layernorm),
        ("blk.1.ffn_norm", layer.pre_feedforward_layernorm),
        ("blk.1.post_ffw_norm", layer.post_feedforward_layernorm),
        ("blk.1.attn_q_norm", layer.self_attn.q_norm),
        ("blk.1.attn_k_norm", layer.self_attn.k_norm),
        ("output_norm", model.model.norm),
    ):
        assert np.array_equal(tensors[f"{name}.weight"], (1.0 + module.weight.detach().float()).numpy())


def test_gemmas_windows_and_caps_are_in_the_keys(tmp_path: Path) -> None:
    _, _, values = exported("Gemma 2, tied", tmp_path / "two")
    assert values["gemma2.attention.sliding_window"] == 8
    assert (values["gemma2.attn_logit_softcapping"], values["gemma2.final_logit_softcapping"]) == (50.0, 30.0)
    assert "gemma2.attention.sliding_window_pattern" not in values  # llama.cpp's own
    _, _, values = exported("Gemma 3, other layers with a window", tmp_path / "three")
    assert values["gemma3.attention.sliding_window_pattern"].length == 3
    assert (values["gemma3.rope.freq_base"], values["gemma3.rope.freq_base_swa"]) == (1e6, 1e4)
    assert values["gemma3.final_logit_softcapping"] == 5.0


def test_both_stacks_of_a_t5_are_written_with_one_table(tmp_path: Path) -> None:
    model, tensors, values = exported("T5, tied", tmp_path)
    encoder, decoder = model.encoder.block[1].layer, model.decoder.block[0].layer
    for name, module in (
        ("enc.blk.1.attn_q", encoder[0].SelfAttention.q),
        ("enc.blk.1.ffn_gate", encoder[1].DenseReluDense.wi_0),
        ("enc.blk.1.ffn_up", encoder[1].DenseReluDense.wi_1),
        ("enc.blk.1.ffn_norm", encoder[1].layer_norm),
        ("dec.blk.0.attn_o", decoder[0].SelfAttention.o),
        ("dec.blk.0.attn_rel_b", decoder[0].SelfAttention.relative_attention_bias),
        ("dec.blk.0.cross_attn_k", decoder[1].EncDecAttention.k),
        ("dec.blk.0.cross_attn_norm", decoder[1].layer_norm),
        ("dec.blk.0.ffn_down", decoder[2].DenseReluDense.wo),
    ):
        assert np.array_equal(tensors[f"{name}.weight"], module.weight.detach().numpy()), name
    assert (values["t5.block_count"], values["t5.decoder_block_count"]) == (2, 1)
    assert values["t5.decoder_start_token_id"] == 0 and values["t5.attention.relative_buckets_count"] == 32
    assert [name for name in tensors if "token_embd" in name] == ["token_embd.weight"]


def test_the_scale_of_a_tied_t5_is_in_the_last_norm(tmp_path: Path) -> None:
    """The norm's weights multiply what the head reads, so that the logits get the factor."""
    model, tensors, _ = exported("T5 with words, tied and scaled", tmp_path)  # 64 features: the factor is 1/8, exactly
    last = model.decoder.final_layer_norm.weight.detach().numpy()
    assert np.array_equal(tensors["dec.output_norm.weight"], last / 8)
    assert np.array_equal(tensors["enc.output_norm.weight"], model.encoder.final_layer_norm.weight.detach().numpy())
    model, tensors, _ = exported("T5, tied", tmp_path / "unscaled")
    assert np.array_equal(tensors["dec.output_norm.weight"], model.decoder.final_layer_norm.weight.detach().numpy())


def test_the_report_says_what_became_of_the_tie_the_scale_and_the_size(tmp_path: Path) -> None:
    made("T5, tied and scaled", tmp_path / "model")
    said = str(export_gguf(tmp_path / "model", tmp_path / "model.gguf"))
    assert "tied: no output.weight, llama.cpp takes token_embd.weight for both ends" in said
    assert "the scale of the logits, 0.144338, is in dec.output_norm.weight" in said
    assert re.search(r"size: 469 kB, 1\.0\d\d times one copy of the weights", said)


@pytest.mark.parametrize(
    ("name", "config", "noted"),
    [
        ("Mistral, untied", {"sliding_window": 32}, True),
        ("Mistral, untied", {"sliding_window": 64}, False),  # as long as the longest text
        ("Qwen 2, tied", {"sliding_window": 32}, False),
        ("Qwen 2, tied", {"sliding_window": 32, "use_sliding_window": True}, True),
    ],
)
def test_a_window_that_llama_cpp_does_not_have_is_noted(
    tmp_path: Path, name: str, config: dict[str, Any], noted: bool
) -> None:
    made(name, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    said = str(export_gguf(tmp_path / "model", tmp_path / "model.gguf"))
    assert ("attention has a window of 32 tokens here and none in llama.cpp" in said) is noted


@pytest.mark.parametrize("stored", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_further_copies_of_a_t5s_table_are_left_out_if_they_are_equal(tmp_path: Path, stored: str) -> None:
    model = made("T5, tied and scaled", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, stored: tensors["shared.weight"].clone()}, path, {"format": "pt"})
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert np.array_equal(np.array(checkpoint.rows("token_embd.weight")), model.shared.weight.detach().numpy())
    save_file({**tensors, stored: tensors["shared.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(BowlineError):
        export_gguf(tmp_path / "model", tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, seen: str, model: str = "Llama, tied", **config: Any) -> None:
    made(model, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(BowlineError, match=seen):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("model", "seen", "config"),
    [
        ("Llama, tied", "hidden_act is 'gelu', expected 'silu'", {"hidden_act": "gelu"}),
        ("Llama, tied", "num_hidden_layers is -1, expected a whole number", {"num_hidden_layers": -1}),
        ("Llama, tied", "'x', expected a finite number", {"rms_norm_eps": "x"}),
        ("Llama, tied", "2.5, expected a whole number", {"num_key_value_heads": 2.5}),
        ("GPT-2, tied", "activation_function is 'relu'", {"activation_function": "relu"}),
        ("GPT-2, tied", "scale_attn_weights is false", {"scale_attn_weights": False}),
        ("Gemma, tied", "hidden_act is 'gelu', expected 'gelu_pytorch_tanh'", {"hidden_act": "gelu"}),
        (
            "Gemma 2, tied",
            "query_pre_attn_scalar is 128, but llama.cpp computes with 32",
            {"query_pre_attn_scalar": 128},
        ),
        ("Gemma 2, tied", "attn_logit_softcapping is null", {"attn_logit_softcapping": None}),
        ("Gemma 2, tied", "no layer has a window", {"layer_types": ["full_attention"] * 3}),
        ("Gemma 2, tied", "use_bidirectional_attention is true", {"use_bidirectional_attention": True}),
        ("Gemma 3, tied", "layer_types is an array of 1", {"layer_types": [["sliding_attention"]]}),
        ("Gemma 3, tied", "sliding_window is null", {"sliding_window": None}),
        ("Gemma 3, tied", "attn_logit_softcapping is 3.0", {"attn_logit_softcapping": 3.0}),
        (
            "Gemma 3, tied",
            "scaled by 'yarn'",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {}}},
        ),
        ("T5, tied and scaled", "feed_forward_proj is 'gated-silu'", {"feed_forward_proj": "gated-silu"}),
        ("T5, tied and scaled", "relative_attention_max_distance is 64", {"relative_attention_max_distance": 64}),
        ("T5, tied and scaled", "decoder_start_token_id is null", {"decoder_start_token_id": None}),
        ("T5, tied and scaled", "num_decoder_layers is 3, expected at most the encoder's 2", {"num_decoder_layers": 3}),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, model: str, seen: str, config: dict[str, Any]
) -> None:
    refused(tmp_path, seen, model, **config)


def test_a_head_of_its_own_is_refused_where_llama_cpp_reads_none(tmp_path: Path) -> None:
    model = made("Gemma 2, tied", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    head = model.lm_head.weight.detach() + 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(TieError, match=r"llama\.cpp's gemma2 takes the embedding for both ends"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


def test_a_class_that_is_not_written_is_named_with_those_that_are(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "'GlmForCausalLM': is not exported to GGUF, expected LlamaForCausalLM",
        architectures=["GlmForCausalLM"],
    )


def test_another_scaling_of_the_rotations_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "the rotary embedding is scaled by 'yarn'", rope_parameters={"rope_type": "yarn", "factor": 2.0})


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    made("Qwen 3, tied", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "Qwen2ForCausalLM"))
    with pytest.raises(BowlineError, match=r"self_attn.k_norm.weight': llama.cpp's qwen2 has no place"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    made("Llama, tied", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(BowlineError, match=r"tokenizer\.json"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


def test_a_split_without_a_name_is_refused(tmp_path: Path) -> None:
    made("Llama, tied", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, content["pre_tokenizer"]]}
    path.write_text(json.dumps(content))
    with pytest.raises(BowlineError, match="for which no name is known here"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


def test_a_model_whose_ends_are_not_known_to_be_one_is_refused(tmp_path: Path) -> None:
    made("Llama, untied", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": ROWS + 1}))
    with pytest.raises((TieError, CheckpointError)):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    made("Llama, tied", tmp_path / "model")
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="exists, expected a new file"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"


CONFIGS = {
    name: {**json.loads(MODELS[name]().config.to_json_string()), "architectures": [architecture]}
    for name, architecture in (
        ("Llama 3's frequencies", "LlamaForCausalLM"),
        ("GPT-2, tied", "GPT2LMHeadModel"),
        ("Gemma, tied", "GemmaForCausalLM"),
        ("Gemma 2, tied", "Gemma2ForCausalLM"),
        ("Gemma 3, tied", "Gemma3ForCausalLM"),
        ("T5, tied and scaled", "T5ForConditionalGeneration"),
    )
}
ODD = [None, True, -1, 0, 7, 2.5, 1e300, 10**40, "", "x", [], ["x"], {}, {"rope_type": "linear"}, {"factor": "x"}]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_a_damaged_config_is_read_or_refused(name: str, data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = config
        key = data.draw(st.sampled_from(sorted(place)))
        while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place)))
        place[key] = data.draw(st.sampled_from(ODD))
    try:
        architecture = architecture_for(config)
        architecture.keys(config)
        architecture.notes(config)
        assert all(min(shape) > 0 for _, shape in islice(architecture.shapes(config), 60))
        rope_factors(config)
    except BowlineError as error:
        assert error.help
