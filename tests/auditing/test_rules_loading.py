"""BW406: names that wrappers changed, at the front and in the middle, in known and unknown classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bowline.auditing import Severity
from bowline.checkpoint.formats.wrapper_names import WRAPPERS
from tests.checkpoints import BERT, GPT2, HEAD, LLAMA, OWN, UNKNOWN, WTE, codes, findings, one, table, write

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


def test_bw406_a_trained_head_under_a_wrapper(tmp_path: Path) -> None:
    tensors = {WTE: table(), f"_orig_mod.{HEAD}": OWN}
    assert codes(write(tmp_path, tensors, GPT2)) == ["BW406"]


def test_bw406_is_not_said_of_the_prefix_that_transformers_adds_itself(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {"embed_tokens.weight": table(), "layers.0.norm.weight": NORM}, TIED_LLAMA)) == []
    assert "BW406" not in codes(write(tmp_path / "2", {f"model.{EMBED}": table()}, TIED_LLAMA))


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
