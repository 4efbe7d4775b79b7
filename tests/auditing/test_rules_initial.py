"""BW405: an untrained checkpoint, compared with the recipes of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.auditing.rules.rule import Severity
from tests.checkpoints import HEAD, WTE, Tensors, codes, one, write

ROWS, WIDTH = 4096, 128
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": ROWS,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "tie_word_embeddings": True,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": ROWS,
    "d_model": WIDTH,
    "d_kv": 64,
    "d_ff": 4 * WIDTH,
    "num_layers": 2,
    "num_heads": 2,
    "tie_word_embeddings": True,
}
SHARED = "shared.weight"


def drawn(std: float, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(scale=std, size=(ROWS, WIDTH)).astype(np.float32)


def t5(std: float, head: float | None = None) -> Tensors:
    return {SHARED: drawn(std)} | ({} if head is None else {"lm_head.weight": drawn(head, seed=1)})


def test_bw405_says_what_a_std_of_one_does_under_a_tie_without_a_scale(tmp_path: Path) -> None:
    found = one(write(tmp_path, t5(1.0), {**T5, "scale_decoder_outputs": False}), "BW405")
    assert found.severity is Severity.WARNING
    assert found.tensors == (SHARED,)
    assert "looks freshly initialised with std 1 (as by t5-mesh, t5x, transformers-t5" in found.message
    assert "the head is tied to it: the first loss would be about 7" in found.message
    assert "while ln V is 8.3" in found.message


def test_bw405_says_it_of_a_head_of_its_own(tmp_path: Path) -> None:
    config = {**T5, "tie_word_embeddings": False}
    found = one(write(tmp_path, t5(1.0, head=1.0), config), "BW405")
    assert found.severity is Severity.WARNING
    assert found.tensors == (SHARED, "lm_head.weight")
    assert "the head with std 1:" in found.message


def test_bw405_names_a_std_that_nobody_draws(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: drawn(0.05)}, GPT2), "BW405")
    assert found.severity is Severity.INFO
    assert "looks freshly initialised with std 0.05, which no recipe of gpt2 uses" in found.message
    assert "0.02 (openai-gpt2)" in found.help
    assert "with 0.05 the first loss is about" in found.help


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (GPT2, {WTE: drawn(0.02)}),
        (GPT2 | {"tie_word_embeddings": False}, {WTE: drawn(0.02), HEAD: drawn(0.02, seed=1)}),
        (GPT2 | {"embed_scale": WIDTH**0.5}, {WTE: drawn(WIDTH**-0.5)}),
        (T5, t5(1.0)),
        (T5 | {"tie_word_embeddings": False}, t5(1.0, head=WIDTH**-0.5)),
    ],
)
def test_bw405_is_not_said_of_a_recipe_whose_scales_belong_to_its_tie(
    config: dict[str, Any], tensors: Tensors, tmp_path: Path
) -> None:
    assert "BW405" not in codes(write(tmp_path, tensors, config))


def test_bw405_is_not_said_of_a_trained_table(tmp_path: Path) -> None:
    lengths = np.linspace(0.5, 2.0, ROWS, dtype=np.float32)[:, None]
    assert "BW405" not in codes(write(tmp_path, {WTE: drawn(1.0) * lengths}, GPT2))


@pytest.mark.parametrize("config", [GPT2 | {"model_type": "mamba"}, {"architectures": ["GPT2LMHeadModel"]}])
def test_bw405_is_not_said_where_the_layers_are_not_known(config: dict[str, Any], tmp_path: Path) -> None:
    assert "BW405" not in codes(write(tmp_path, {WTE: drawn(1.0)}, config))


@pytest.mark.parametrize(
    "wrong",
    [{"n_head": 0}, {"n_head": "2"}, {"n_layer": 10**9}, {"activation_function": "snake"}, {"embed_scale": "x"}],
)
def test_bw405_leaves_the_audit_alone_where_the_config_says_what_cannot_be(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    assert "BW405" not in codes(write(tmp_path, {WTE: drawn(1.0)}, GPT2 | wrong))


def test_bw405_is_quick_whatever_the_std(tmp_path: Path) -> None:
    assert "about 27" in one(write(tmp_path, {WTE: drawn(3e3)}, GPT2), "BW405").message
