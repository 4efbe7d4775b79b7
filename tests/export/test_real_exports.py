"""Exports run by llama.cpp and mlx-lm: the same ids for a text, and the same greedy tokens as transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from bowline.export.gguf import export_gguf
from bowline.export.hub_layout import export_layout
from tests.export.gguf_models import MODELS, made

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("quiet_transformers")]

PEERS = Path(__file__).parents[2] / ".peers"
LLAMA_CPP, MLX = PEERS / "llama-cpp", PEERS / "mlx-lm-0.32.2"
SCRIPT = Path(__file__).parents[1] / "edit" / "llama_cpp_greedy.py"
needs_llama_cpp = pytest.mark.skipif(not (LLAMA_CPP / "ready").exists(), reason="make sweep-llama-cpp builds llama.cpp")
TEXT = "def tie(weights): return weights 12"


def by_llama_cpp(file: Path, text: str, count: int, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text").write_text(text)
    command = [sys.executable, str(SCRIPT), str(file), str(tmp_path / "text"), str(count)]
    environment = os.environ | {"LLAMA_CPP": str(LLAMA_CPP)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_transformers(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens, heights = list(ids), []
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            heights.append(float(logits.max()))
    return tokens[len(ids) :], heights


@needs_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    found = by_llama_cpp(tmp_path / "model.gguf", TEXT, 8, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    tokens, heights = by_transformers(model, ids, 8)
    assert found["prompt"] == ids
    assert found["greedy"] == tokens
    assert found["logits"] == pytest.approx(heights, abs=0.01)  # llama.cpp keeps keys and values in float16


@needs_llama_cpp
def test_a_real_tied_model_says_the_same_sixteen_tokens(tmp_path: Path) -> None:
    source = PEERS / "real" / "smollm2"
    report = export_gguf(source, tmp_path / "smollm2.gguf")
    assert report.clean and "no output.weight" in str(report)
    stored = (source / "model.safetensors").stat().st_size
    assert (tmp_path / "smollm2.gguf").stat().st_size < 1.02 * stored  # one copy, and the tokenizer
    text = "The capital of France is"
    found = by_llama_cpp(tmp_path / "smollm2.gguf", text, 16, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"]
    assert found["prompt"] == ids
    assert found["greedy"] == by_transformers(model, ids, 16)[0]


@pytest.mark.skipif(not (MLX / "ready").exists(), reason="make sweep-mlx installs mlx-lm")
def test_mlx_lm_says_the_same_sixteen_tokens(tmp_path: Path) -> None:
    source = PEERS / "real" / "smollm2"
    report = export_layout(source, tmp_path / "mlx", to="mlx")
    assert "mlx-lm: lm_head.weight is tied" in str(report)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(source)("The capital of France is")["input_ids"]
    script = Path(__file__).parent / "mlx_greedy.py"
    command = [str(MLX / "bin" / "python"), str(script), str(tmp_path / "mlx"), "16", *map(str, ids)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == by_transformers(model, ids, 16)[0]
