"""BW406: names that wrappers changed, at the front and in the middle, in known and unknown classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from bowline.auditing import Severity
from bowline.checkpoint.formats.wrapper_names import WRAPPERS
from tests.checkpoints import BERT, GPT2, HEAD, LLAMA, OWN, T5, UNKNOWN, WTE, codes, findings, one, table, write

NORM = np.ones(8, np.float32)
EMBED, LAYER = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
TIED_LLAMA = {**LLAMA, "tie_word_embeddings": True}


# --- BW406 wrapped-names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WRAPPERS)
def test_bw406_a_wrapper_in_the_layers_beside_an_intact_tie(tmp_path: Path, word: str) -> None:
    wrapped = LAYER.replace("0.", f"0.{word}.")
    found = one(write(tmp_path, {EMBED: table(), wrapped: NORM}, TIED_LLAMA), "BW406")
    assert (found.severity, found.tensors) == (Severity.ERROR, (wrapped,))
    assert f"1 of 2 tensor names have the part '{word}.'" in found.message
    assert "at random" in found.message


def test_bw406_each_wrapper_is_counted(tmp_path: Path) -> None:
    names = [f"model.layers.{at}._fsdp_wrapped_module._checkpoint_wrapped_module.norm.weight" for at in range(3)]
    found = findings(write(tmp_path, {EMBED: table(), **dict.fromkeys(names, NORM)}, TIED_LLAMA))
    assert [finding.message[:55] for finding in found] == [
        "3 of 4 tensor names have the part '_fsdp_wrapped_module",
        "3 of 4 tensor names have the part '_checkpoint_wrapped_",
    ]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.", "base_model.model."])
def test_bw406_a_prefix_before_every_name(tmp_path: Path, prefix: str) -> None:
    found = one(write(tmp_path, {prefix + EMBED: table(), prefix + LAYER: NORM}, TIED_LLAMA), "BW406")
    assert f"2 of 2 tensor names have the part '{prefix}'" in found.message
    assert ("merge the adapter" in found.help) is prefix.startswith("base_model")


@pytest.mark.parametrize("name", ["weight_orig", "parametrizations.weight.original"])
def test_bw406_a_weight_that_is_stored_as_what_it_is_computed_from(tmp_path: Path, name: str) -> None:
    layer = f"model.layers.0.self_attn.q_proj.{name}"
    found = one(write(tmp_path, {EMBED: table(), layer: table()}, TIED_LLAMA), "BW406")
    assert f"have the part '{name.rpartition('.')[2]}', which torch.nn.utils.p" in found.message
    assert "make the computed weights ordinary ones" in found.help
    weight_norm = "model.layers.0.conv.parametrizations.weight.original0"
    assert "BW406" not in codes(write(tmp_path / "norm", {EMBED: table(), weight_norm: table()}, TIED_LLAMA))
    assert "BW406" not in codes(write(tmp_path / "unknown", {"embed.weight": table(), layer: table()}, UNKNOWN))


def test_bw406_a_trained_head_under_a_wrapper(tmp_path: Path) -> None:
    tensors = {WTE: table(), f"_orig_mod.{HEAD}": OWN}
    assert codes(write(tmp_path, tensors, GPT2)) == ["BW406"]


def test_bw406_is_not_said_of_the_prefix_that_transformers_adds_itself(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {"embed_tokens.weight": table(), "layers.0.norm.weight": NORM}, TIED_LLAMA)) == []


def test_bw406_warns_of_the_models_own_prefix_once_more(tmp_path: Path) -> None:
    found = one(write(tmp_path, {f"model.{EMBED}": table(), f"model.{LAYER}": NORM}, TIED_LLAMA), "BW406")
    assert found.severity is Severity.WARNING
    assert "names begin with 'model.' once more than the class's" in found.message
    assert found.help == "load with transformers 5 and save again"


def test_bw406_is_a_warning_for_a_class_that_may_have_such_names(tmp_path: Path) -> None:
    tensors = {"module.embed_tokens.weight": table(), "module.head.weight": OWN}
    assert one(write(tmp_path, tensors, UNKNOWN), "BW406").severity is Severity.WARNING


def test_bw406_is_not_said_of_a_module_among_the_names_of_an_unknown_class(tmp_path: Path) -> None:
    tensors = {"embed_tokens.weight": table(), "layers.0.module.weight": NORM}
    assert "BW406" not in codes(write(tmp_path, tensors, UNKNOWN))


def test_bw406_is_not_said_of_the_names_that_classes_have(tmp_path: Path) -> None:
    names = ["bert.encoder.layer.0.output.LayerNorm.weight", "bert.embeddings.position_embeddings.weight"]
    bert = {"bert.embeddings.word_embeddings.weight": table(), **dict.fromkeys(names, NORM)}
    assert "BW406" not in codes(write(tmp_path, bert, BERT))


# --- BW407 layers-missing -------------------------------------------------------------------------------------------


def llama(path: Path, stored: Iterable[int], **config: object) -> Path:
    layers = {f"model.layers.{at}.norm.weight": NORM for at in stored}
    return write(path, {EMBED: table(), **layers}, {**TIED_LLAMA, **config})


def test_bw407_layers_at_the_end_or_in_the_middle_are_missing(tmp_path: Path) -> None:
    found = one(llama(tmp_path / "a", range(3), num_hidden_layers=5), "BW407")
    assert found.severity is Severity.ERROR
    assert "num_hidden_layers is 5, but 2 of the layers 'model.layers.N' are not stored (3, 4)" in found.message
    assert "1 of the layers" in one(llama(tmp_path / "b", [0, 2], num_hidden_layers=3), "BW407").message


def test_bw407_is_not_said_when_all_are_stored_or_more(tmp_path: Path) -> None:
    assert codes(llama(tmp_path / "a", range(3), num_hidden_layers=3)) == []
    assert codes(llama(tmp_path / "b", [0, 1, 3], num_hidden_layers=3)) == []  # a layer more, for another head
    assert codes(llama(tmp_path / "c", range(3))) == []


@pytest.mark.parametrize("count", [None, "5", True, 0, -1, 10**30, 5.0])
def test_bw407_is_not_said_of_a_number_that_is_none(tmp_path: Path, count: object) -> None:
    assert "BW407" not in codes(llama(tmp_path, range(3), num_hidden_layers=count))


def test_bw407_is_not_said_of_two_stacks_or_of_a_towers_layers(tmp_path: Path) -> None:
    two = {"shared.weight": table(), "encoder.block.0.norm.weight": NORM, "decoder.block.0.norm.weight": NORM}
    assert "BW407" not in codes(write(tmp_path / "a", two, {**T5, "num_layers": 2}))
    tower = {EMBED: table(), LAYER: NORM, "vision_tower.layers.0.norm.weight": NORM}
    assert "BW407" not in codes(write(tmp_path / "b", tower, {**TIED_LLAMA, "num_hidden_layers": 1}))
