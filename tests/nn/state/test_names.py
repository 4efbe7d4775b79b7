"""Names on disk and in the model: what transformers calls its tensors there, in either direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from tools.tiny import build, load_class, tiny_config

from bowline.errors import CheckpointError, TieError
from bowline.nn import check_ties, load_checkpoint, save_checkpoint
from bowline.nn.state.tensor_names import to_disk, to_live, unwrapped
from tests.nn.models import TinyLM
from tests.nn.state.snapshots import snapshot

pytestmark = pytest.mark.usefixtures("quiet_transformers")

State = dict[str, torch.Tensor]


def made(name: str, seed: int = 0) -> Any:
    cls = load_class(name)
    return build(cls, tiny_config(cls), seed)


def on_meta(name: str) -> Any:
    cls = load_class(name)
    with torch.device("meta"):
        return cls(tiny_config(cls)).eval()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- both ways --------------------------------------------------------------------------------------------------------

RENAMED = {
    "LlavaForConditionalGeneration": ("language_model.lm_head.weight", "lm_head.weight"),
    "PaliGemmaForConditionalGeneration": ("language_model.model.embed_tokens.weight", "embed_tokens.weight"),
    "GPTNeoXForCausalLM": ("embed_out.weight", "embed_out.weight"),
    "MixtralForCausalLM": ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "gate_up_proj"),
    "Qwen3MoeForCausalLM": ("model.layers.0.mlp.experts.0.gate_proj.weight", "gate_up_proj"),
}
"""A class, a name on disk that its own table makes, and what the live name ends in."""


@pytest.mark.parametrize("name", [*RENAMED, "GPT2LMHeadModel", "BertForMaskedLM", "Qwen2VLForConditionalGeneration"])
def test_files_have_the_names_that_save_pretrained_gives_and_both_readers_know_them(name: str, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / place / "model.safetensors") for place in ("theirs", "ours"))
    untied = {"embed_out.weight", "lm_head.weight", "language_model.lm_head.weight"}
    assert same(
        {k: v for k, v in ours.items() if k not in untied}, {k: v for k, v in theirs.items() if k not in untied}
    )
    for place in ("theirs", "ours"):
        blank = on_meta(name)
        load_checkpoint(blank, tmp_path / place)
        assert same(blank.state_dict(), model.state_dict())
    assert same(type(model).from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


@pytest.mark.parametrize("name", RENAMED)
def test_there_and_back_is_where_one_was(name: str) -> None:
    model = made(name)
    state = dict(model.state_dict())
    stored = to_disk(model, state)
    assert same(to_live(model, model.state_dict(), stored), state)
    assert same(to_disk(model, to_live(model, model.state_dict(), stored)), stored)


def test_a_model_that_is_not_of_transformers_keeps_its_names() -> None:
    model = TinyLM()
    state = dict(model.state_dict())
    assert list(to_disk(model, state)) == list(to_live(model, model.state_dict(), state)) == list(state)


def test_wrappers_are_taken_off_whatever_their_order() -> None:
    model = TinyLM()
    wrapped: Any = torch.nn.DataParallel(torch.nn.DataParallel(model))
    assert unwrapped(wrapped) is unwrapped(model) is model


# --- bases and heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "whole"), [("BertModel", "BertForMaskedLM"), ("GPT2Model", "GPT2LMHeadModel")])
def test_a_bases_checkpoint_goes_into_the_model_with_a_head_and_back(base: str, whole: str, tmp_path: Path) -> None:
    config = tiny_config(load_class(whole))
    options = {"add_pooling_layer": False} if base == "BertModel" else {}
    body = load_class(base)(config, **options).eval()
    save_checkpoint(body, tmp_path / "base")
    model = made(whole, seed=1)
    prefix = model.base_model_prefix
    assert not any(name.startswith(prefix + ".") for name in load_file(tmp_path / "base" / "model.safetensors"))
    report = load_checkpoint(model, tmp_path / "base", strict=False)
    assert not report.unexpected
    assert all(name.startswith("cls.") for name in report.missing)
    assert same(getattr(model, prefix).state_dict(), body.state_dict())
    assert check_ties(model), "the head follows the table that came"

    save_checkpoint(made(whole, seed=2), tmp_path / "whole")
    report = load_checkpoint(body, tmp_path / "whole", strict=False)
    assert not report.missing
    assert same(body.state_dict(), getattr(made(whole, seed=2), prefix).state_dict())


def test_a_bases_checkpoint_leaves_no_head_to_chance(tmp_path: Path) -> None:
    config = tiny_config(load_class("GPT2LMHeadModel"))
    config.tie_word_embeddings = False
    save_checkpoint(load_class("GPT2Model")(config), tmp_path)
    model = build(load_class("GPT2LMHeadModel"), config)
    untouched = snapshot(model)
    with pytest.raises(TieError, match=r"lm_head\.weight: not in the state, which holds transformer\.wte\.weight"):
        load_checkpoint(model, tmp_path)
    assert snapshot(model) == untouched


def test_old_names_of_a_norm_are_read(tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    save_checkpoint(model, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(file).items()
    }
    assert any(name.endswith("LayerNorm.gamma") for name in old)
    save_file(old, file, {"format": "pt"})
    blank = on_meta("BertForMaskedLM")
    assert load_checkpoint(blank, tmp_path)
    assert same(blank.state_dict(), model.state_dict())


# --- what no file holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "GPTJForCausalLM", "MarianMTModel"])
def test_what_no_file_holds_is_computed_as_transformers_computes_it(name: str, tmp_path: Path) -> None:
    save_checkpoint(made(name), tmp_path)
    blank, theirs = on_meta(name), load_class(name).from_pretrained(tmp_path)
    load_checkpoint(blank, tmp_path)
    buffers = dict(theirs.named_buffers())
    assert dict(blank.named_buffers()).keys() == buffers.keys()
    assert all(torch.equal(value, buffers[name]) for name, value in blank.named_buffers())
    assert same(blank.state_dict(), theirs.state_dict())
    assert not any("_is_hf_initialized" in parameter.__dict__ for parameter in blank.parameters())


@pytest.mark.parametrize("name", ["MarianMTModel", "FastSpeech2ConformerModel"])
def test_buffers_that_the_file_holds_stay_as_loaded_beside_what_is_computed(name: str, tmp_path: Path) -> None:
    model = made(name)
    stored = model.state_dict().keys() & dict(model.named_buffers()).keys()
    floating = {key: value for key, value in model.named_buffers() if key in stored and value.is_floating_point()}
    assert floating
    for value in floating.values():
        value.uniform_(1, 2)
    save_checkpoint(model, tmp_path)
    blank = on_meta(name)
    load_checkpoint(blank, tmp_path)
    buffers = dict(blank.named_buffers())
    assert [key for key, value in floating.items() if not torch.equal(value, buffers[key])] == []
    assert not any("_is_hf_initialized" in value.__dict__ for value in buffers.values())


def test_names_that_the_class_lets_lack_are_not_missed(tmp_path: Path) -> None:
    model = made("GPTNeoXForCausalLM")
    save_checkpoint(model, tmp_path)
    file = tmp_path / "model.safetensors"
    old = load_file(file) | {"gpt_neox.layers.0.attention.bias": torch.ones(1)}  # a mask that old versions stored
    save_file(old, file, {"format": "pt"})
    assert load_checkpoint(on_meta("GPTNeoXForCausalLM"), tmp_path)
    save_file(old | {"gpt_neox.layers.0.another": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected gpt_neox\.layers\.0\.another"):
        load_checkpoint(on_meta("GPTNeoXForCausalLM"), tmp_path)


def test_a_refused_load_leaves_the_names_under_which_the_model_is_saved(tmp_path: Path) -> None:
    model = made("LlavaForConditionalGeneration")
    save_checkpoint(model, tmp_path / "before")
    wrong = load_file(tmp_path / "before" / "model.safetensors")
    name = next(name for name in wrong if name.endswith("embed_tokens.weight"))
    wrong[name] = wrong[name][1:].clone()
    (tmp_path / "wrong").mkdir()
    save_file(wrong, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(model, tmp_path / "wrong")
    assert snapshot(model) == untouched
    save_checkpoint(model, tmp_path / "after")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("before", "after"))
    assert same(before, after)
    assert json.loads((tmp_path / "after" / "config.json").read_text())["model_type"] == "llava"
