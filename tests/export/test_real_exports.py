"""Exports run by llama.cpp, mlx-lm and onnxruntime: ids, greedy tokens and logits beside those of transformers."""

from __future__ import annotations

import copy
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
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

import bowline
from bowline.cli import app
from bowline.export.gguf import export_gguf
from bowline.export.hub_layout import export_layout
from bowline.export.onnx_model import OnnxRun
from bowline.export.plain_call import example_inputs, resized
from bowline.nn import load_checkpoint
from tests.export.gguf_models import BUILT, MODELS, made, tokenizer_of
from tests.export.gguf_tokenizers import TOKENIZERS
from tests.export.test_quantised_exports import quantised

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
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_transformers(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    encodes = model.config.is_encoder_decoder
    tokens, heights = [model.config.decoder_start_token_id] if encodes else list(ids), []
    with torch.no_grad():
        for _ in range(count):
            said = torch.tensor([tokens])
            both = {"input_ids": torch.tensor([ids]), "decoder_input_ids": said} if encodes else {"input_ids": said}
            logits = model(**both).logits[0, -1]
            tokens.append(int(logits.argmax()))
            heights.append(float(logits.max()))
    return tokens[-count:], heights


@needs_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    found = by_llama_cpp(tmp_path / "model.gguf", TEXT, 16, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=model.config.is_encoder_decoder).ids
    tokens, heights = by_transformers(model, ids, 16)
    assert found["prompt"] == ids
    assert found["greedy"] == tokens
    assert found["logits"] == pytest.approx(heights, abs=0.01)  # llama.cpp keeps keys and values in float16


TEXTS = [
    "The bowline  makes\ta loop\n\n  at the end",
    "\n\n\n\n\n\n\n",
    "     five     spaces          ten  ",
    "日本語 und Ümläute 🎉 größer é e\u0301",
    "aaaaaaaaa bbbbb -----==== ﬁne … ①②",
    "word<unused0>word",
    "",
]


@needs_llama_cpp
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_llama_cpp_splits_as_the_tokenizer_does(tokenizer: str, tmp_path: Path) -> None:
    name = next(name for name in MODELS if tokenizer_of(name) == BUILT[tokenizer])
    made(name, tmp_path / "model")
    report = str(export_gguf(tmp_path / "model", tmp_path / "model.gguf"))
    library = tokenizers.Tokenizer.from_str(BUILT[tokenizer])
    encodes = name.startswith("T5")
    for text in TEXTS:
        if not ("one space more" in report and text.startswith(" ")):
            expected = library.encode(text, add_special_tokens=encodes).ids
            assert by_llama_cpp(tmp_path / "model.gguf", text, 0, tmp_path)["prompt"] == expected, text


@needs_llama_cpp
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["GPT-2, tied", "Gemma 3, tied", "T5, tied and scaled"])
def test_llama_cpp_computes_with_the_floats_of_a_quantised_table(name: str, dtype: str, tmp_path: Path) -> None:
    model = quantised(name, tmp_path, dtype)
    export_gguf(tmp_path / "codes", tmp_path / "model.gguf")
    found = by_llama_cpp(tmp_path / "model.gguf", TEXT, 16, tmp_path)
    tokens, heights = by_transformers(model, found["prompt"], 16)
    assert found["greedy"] == tokens
    assert found["logits"] == pytest.approx(heights, abs=0.01)


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


@needs_llama_cpp
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_real_quantised_model_says_the_same_sixteen_tokens(dtype: str, tmp_path: Path) -> None:
    source = PEERS / "real" / "smollm2"
    command = ["quantize", str(source), str(tmp_path / "codes"), "--dtype", dtype]
    assert CliRunner().invoke(app, command).exit_code == 0
    report = str(export_gguf(tmp_path / "codes", tmp_path / "smollm2.gguf"))
    assert "model.embed_tokens.weight was dequantised from" in report
    found = by_llama_cpp(tmp_path / "smollm2.gguf", "The capital of France is", 16, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    load_checkpoint(model, tmp_path / "codes")
    tokens, heights = by_transformers(model, found["prompt"], 16)
    assert found["greedy"] == tokens
    assert found["logits"] == pytest.approx(heights, abs=0.05)  # they reach 38, and keys and values are in float16


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


def in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with every step in float64; transformers computes norms and rotary angles in float32 otherwise."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        size = hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        scaled: torch.Tensor = self.weight * hidden * size.rsqrt()
        return scaled

    def rotary(self: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * frequencies
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()

    frequencies = model.model.rotary_emb.inv_freq.double()
    wide = copy.deepcopy(model).double()
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)
    return wide


def test_onnx_is_no_further_from_float64_than_torch_is(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two differ by more than 1e-4 where logits reach 36: rounding, of which each has its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    report = bowline.export(model, tmp_path / "smollm2.onnx", to="onnx")
    run = OnnxRun(tmp_path / "smollm2.onnx", model, ties=report.ties, run=True)
    text = transformers.AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt")
    example = example_inputs(model, None)
    cases: list[Any] = [example, resized(example), {name: text[name] for name in example}]
    with torch.no_grad():
        by_torch = [model(**given).logits.double() for given in cases]
        wide = in_float64(model, monkeypatch)
        exact = [wide(**given).logits for given in cases]
    by_onnx = [run.run(given)[0].double() for given in cases]

    def furthest(got: list[torch.Tensor]) -> float:
        return max(float((one - other).abs().max()) for one, other in zip(got, exact, strict=True))

    assert max(float(one.abs().max()) for one in exact) > 30
    assert furthest(by_torch) < 1e-4
    assert furthest(by_onnx) < 1e-4
    assert furthest(by_onnx) < 1.5 * furthest(by_torch)
