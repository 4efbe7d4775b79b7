"""Checkpoints of `bowline quantize` in other formats: the table as floats, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import bowline
from bowline.auditing import audit
from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.places.byte_source import LocalFile
from bowline.cli import app
from bowline.errors import BowlineError, TieError
from bowline.export.gguf import export_gguf
from bowline.export.hub_layout import export_layout
from bowline.nn import load_checkpoint
from tests.export.gguf_models import MODELS, ROWS, made

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def quantised(name: str, place: Path, dtype: str, floats: torch.dtype = torch.float32) -> Any:
    """A model with a table of codes at `place / "codes"`, as `load_checkpoint` reads it."""
    made(name, place / "model", floats)
    options = ["--group-size", "16"] if dtype == "int4" else []
    arguments = ["quantize", str(place / "model"), str(place / "codes"), "--dtype", dtype, *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    model = MODELS[name]().to(floats).eval()
    load_checkpoint(model, place / "codes")
    return model


def looked_up(model: Any) -> torch.Tensor:
    """The rows that the model looks up, without the factor of Gemma's embeddings."""
    embedding = model.get_input_embeddings()
    rows: torch.Tensor = embedding(torch.arange(model.config.vocab_size)).detach()
    scale = getattr(embedding, "embed_scale", None)
    return rows if scale is None else rows / scale


CASES = [
    ("Llama, tied", "int8", torch.float32),
    ("Llama, tied", "int8", torch.bfloat16),
    ("Llama, tied", "int4", torch.float32),
    ("Llama, tied", "int4", torch.bfloat16),
    ("GPT-2, tied", "int8", torch.float16),
    ("T5, tied and scaled", "int8", torch.float32),
    ("T5, tied and scaled", "int4", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype", "floats"), CASES)
def test_the_rows_are_those_that_the_codes_stand_for(
    name: str, dtype: str, floats: torch.dtype, tmp_path: Path
) -> None:
    model = quantised(name, tmp_path, dtype, floats)
    report = str(export_gguf(tmp_path / "codes", tmp_path / "model.gguf"))
    assert (
        f"weight was dequantised from {'torchao int8, a scale per row' if dtype == 'int8' else 'int4 table'}" in report
    )
    assert "tied: no output.weight" in report
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        rows = torch.from_numpy(np.array(checkpoint.rows("token_embd.weight"))).to(floats)
        assert "output.weight" not in checkpoint.tensors
    assert torch.equal(rows, looked_up(model))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["Llama, tied", "Gemma 3, tied", "T5, tied and scaled"])
def test_transformers_loads_the_floats_and_computes_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    model = quantised(name, tmp_path, dtype)
    report = str(export_layout(tmp_path / "codes", tmp_path / "floats", to="hf"))
    assert "was dequantised from" in report and "lm_head.weight is tied" in report
    loaded: Any = type(model).from_pretrained(tmp_path / "floats")
    ids = torch.arange(12)[None]
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        torch.testing.assert_close(loaded(**given).logits, model(**given).logits, rtol=0, atol=1e-4)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    header = read_header(LocalFile(tmp_path / "floats" / "model.safetensors", "model.safetensors"))
    assert dict(header.metadata) == {"format": "pt"}
    assert audit(tmp_path / "floats").clean


def test_mlx_gets_floats_too(tmp_path: Path) -> None:
    quantised("Llama, tied", tmp_path, "int4")
    assert "mlx-lm: lm_head.weight is tied" in str(export_layout(tmp_path / "codes", tmp_path / "mlx", to="mlx"))


@pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
@pytest.mark.parametrize(("name", "dtype"), [("Llama, tied", "int8"), ("GPT-2, tied", "int4")])
def test_exporters_that_run_the_model_name_the_way_out(to: str, name: str, dtype: str, tmp_path: Path) -> None:
    quantised(name, tmp_path, dtype)
    with pytest.raises(
        BowlineError, match=r"its table is quantised \(by `bowline quantize`\), expected floats"
    ) as raised:
        bowline.export(tmp_path / "codes", tmp_path / "out", to=to)  # type: ignore[call-overload]
    assert raised.value.help is not None and "--to hf" in raised.value.help
    assert not (tmp_path / "out").exists()


def test_the_way_out_leads_to_onnx(tmp_path: Path) -> None:
    model = quantised("GPT-2, tied", tmp_path, "int8")
    bowline.export(tmp_path / "codes", tmp_path / "floats", to="hf")
    report = bowline.export(tmp_path / "floats", tmp_path / "model.ts", to="torchscript")
    assert report.verified and report.copies == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "floats")
    assert torch.equal(loaded.transformer.wte.weight, looked_up(model))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gguf", "hf", "mlx"])
def test_a_head_beside_the_table_is_refused(to: str, tmp_path: Path) -> None:
    quantised("Llama, tied", tmp_path, "int4")
    file = tmp_path / "codes" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": torch.ones(3, 3)}, file, {"format": "pt"})
    with pytest.raises(BowlineError, match=r"lm_head\.weight is stored beside a quantised table"):
        bowline.export(tmp_path / "codes", tmp_path / "out.gguf", to=to)  # type: ignore[call-overload]
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("dtype", "codes"), [("int8", "_weight_qdata"), ("int4", "table.values")])
@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_floats_beside_the_table_are_refused(to: str, dtype: str, codes: str, tmp_path: Path) -> None:
    quantised("Llama, tied", tmp_path, dtype)
    file = tmp_path / "codes" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        said = opened.metadata()
    tensors = load_file(file)
    save_file({**tensors, "model.embed_tokens.weight": torch.ones(ROWS, 64)}, file, said)
    with pytest.raises(TieError, match=rf"model\.embed_tokens\.weight is stored beside its .* \(.*{codes}\)"):
        bowline.export(tmp_path / "codes", tmp_path / "out.gguf", to=to)  # type: ignore[call-overload]
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("part", "value", "seen"),
    [
        ("table.values", None, "no tensor holds its codes"),
        ("table.scale", None, "the table cannot be dequantised"),
        ("table.scale", torch.ones(5, 2), "the table cannot be dequantised"),
        ("table.values", torch.ones(4, 4), "the table cannot be dequantised"),
    ],
)
def test_a_damaged_table_is_refused(part: str, value: torch.Tensor | None, seen: str, tmp_path: Path) -> None:
    quantised("Llama, tied", tmp_path, "int4")
    file = tmp_path / "codes" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.embed_tokens.{part}"
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BowlineError, match=seen):
        export_gguf(tmp_path / "codes", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_weights_that_another_tool_quantised_are_refused_by_its_name(tmp_path: Path) -> None:
    made("Llama, tied", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BowlineError, match="the weights are quantised"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")
