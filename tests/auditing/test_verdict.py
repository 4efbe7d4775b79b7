"""The first line of a report: what the bytes hold, what the flag says, and the loaders by what they make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.auditing import audit
from bowline.auditing.verdict import verdict
from tests.checkpoints import GPT2, HEAD, LLAMA, OWN, UNKNOWN, WTE, table, write

UNTIED = {**GPT2, "tie_word_embeddings": False}
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
WHOLE = {**LLAMA, **SIZES, "rms_norm_eps": 1e-5}
"""A config that every loader reads."""


def said(path: Path, tensors: Any, config: Any, **options: Any) -> str:
    return verdict(audit(write(path, tensors, config), **options).evidence)


def on_disk(path: Path, tensors: Any, config: Any) -> str:
    return said(path, tensors, config).partition(": ")[0]


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        ({WTE: table()}, GPT2, "one matrix, stored once"),
        ({WTE: table(), HEAD: table()}, GPT2, "one matrix, stored twice"),
        ({WTE: table(), HEAD: table()}, UNTIED, "one matrix, stored twice, but the flag says untied"),
        ({WTE: table(), HEAD: OWN}, GPT2, "head and embedding differ, but the flag says tied"),
        ({WTE: table(), HEAD: OWN}, UNTIED, "two matrices"),
        ({WTE: table()}, UNTIED, "only the embedding is stored, but the flag says untied"),
        ({HEAD: table()}, GPT2, "only the head is stored"),
        ({HEAD: table()}, UNTIED, "only the head is stored, but the flag says untied"),
        ({"other": table()}, GPT2, "neither head nor embedding is stored"),
        (
            {WTE: table(), HEAD: table(72)},
            GPT2,
            "head and embedding have different shapes, but the flag says tied",
        ),
        ({WTE: table(), HEAD: OWN.astype(np.float64)}, UNTIED, "head and embedding have different dtypes"),
    ],
)
def test_the_state_of_the_two_ends(tmp_path: Path, tensors: Any, config: Any, expected: str) -> None:
    assert on_disk(tmp_path, tensors, config) == expected


def test_loaders_that_agree_are_one_word(tmp_path: Path) -> None:
    embedding = "model.embed_tokens.weight"
    tied = said(tmp_path / "1", {embedding: table()}, {**WHOLE, "tie_word_embeddings": True})
    assert tied == "one matrix, stored once: tied in every loader"
    untied = said(tmp_path / "2", {embedding: table(), HEAD: OWN}, WHOLE)
    assert untied == "two matrices: kept in every loader"


@pytest.mark.parametrize(
    ("entry", "loaders"),
    [
        (
            {"quant_method": "compressed-tensors"},
            "tied in transformers 4, transformers 5, vLLM before 0.29, vLLM and llama.cpp",
        ),
        (
            {"quant_method": "bitsandbytes"},
            "tied in transformers 4, transformers 5, vLLM before 0.29 and vLLM; refused by llama.cpp and mlx-lm",
        ),
    ],
)
def test_every_loader_is_not_said_if_one_is_unknown(tmp_path: Path, entry: Any, loaders: str) -> None:
    """With float ends beside a `quantization_config`: the outcome in mlx-lm depends on the other weights."""
    config = {**WHOLE, "tie_word_embeddings": True, "quantization_config": entry}
    assert said(tmp_path, {"model.embed_tokens.weight": table()}, config) == f"one matrix, stored once: {loaders}"


def test_loaders_that_differ_are_named_by_what_they_do(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": table(), HEAD: OWN}
    sentence = said(tmp_path, tensors, {**WHOLE, "tie_word_embeddings": True})
    before, _, loaders = sentence.partition(": ")
    assert before == "head and embedding differ, but the flag says tied"
    fates = dict(part.split(" in ", 1) for part in loaders.split("; "))
    assert fates["dropped"].startswith("transformers 4")
    assert fates["kept"].startswith("transformers 5")


def test_a_class_that_is_not_known_has_a_state_and_no_loaders(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": table(), HEAD: OWN}
    assert said(tmp_path, tensors, {**UNKNOWN, "tie_word_embeddings": False}) == ("two matrices")


def test_without_values_two_stored_ends_are_not_compared(tmp_path: Path) -> None:
    assert said(tmp_path, {WTE: table(), HEAD: table()}, GPT2, values=False).startswith(
        "head and embedding were not compared"
    )


def test_a_class_without_a_head(tmp_path: Path) -> None:
    config = {**GPT2, "architectures": ["GPT2Model"]}
    assert said(tmp_path, {WTE: table()}, config) == "no head to tie"
