"""Checkpoints as GGUF: the rows, the keys and the tie, against loops over the live model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bowline.auditing import audit
from bowline.checkpoint import open_checkpoint
from bowline.errors import BowlineError, CheckpointError, TieError
from bowline.export.gguf import export_gguf
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


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, seen: str, **config: Any) -> None:
    made("Llama, tied", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(BowlineError, match=seen):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


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
