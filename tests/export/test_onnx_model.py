"""ONNX: one initializer in the file and after onnxruntime's optimiser, external data, opset; what is refused."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bowline
from bowline.checkpoint.formats.onnx.model import read_onnx
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import CheckpointError, UsageError
from bowline.export.export_report import ExportReport
from tests.export.live_models import ROWS, Plain, gpt2, llama_directory, logits, one_copy, t5, tokens

RESIDENT = """
import sys
import onnxruntime

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before = anonymous()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print(anonymous() - before)
"""
"""Prints the anonymous bytes that a session adds."""
onnxruntime: Any = import_module("onnxruntime")  # it has no types
IDS = (torch.zeros(3, 7, dtype=torch.int64),)


def session(file: Path, optimised: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def matrices(file: Path, rows: int = ROWS) -> list[str]:
    """The initializers of the vocabulary's size."""
    graph = onnx.load(str(file), load_external_data=False).graph
    return [one.name for one in graph.initializer if len(one.dims) == 2 and rows in one.dims]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, ExportReport]:
    """A GPT-2, its ONNX file and the report."""
    file = tmp_path_factory.mktemp("gpt2") / "model.onnx"
    model = gpt2()
    return model, file, bowline.export(model, file, to="onnx")


def test_one_initializer_serves_both_ends_before_and_after_the_optimiser(
    exported: tuple[Any, Path, ExportReport], tmp_path: Path
) -> None:
    model, file, report = exported
    session(file, tmp_path / "optimised.onnx")
    assert len(matrices(file)) == 1
    assert len(matrices(tmp_path / "optimised.onnx")) == 1
    assert "one initializer in the file and one initializer after onnxruntime's optimiser" in str(report)
    assert report.copies == 0
    assert file.stat().st_size == report.nbytes < 1.02 * one_copy(model)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_onnxruntime_holds_the_table_once_in_memory(tmp_path: Path) -> None:
    """A constant matrix would be packed into a second one for the product."""
    rows, width = 60_000, 128
    wide = Plain()
    wide.wte, wide.lm_head = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
    wide.lm_head.weight = wide.wte.weight
    report = bowline.export(wide, tmp_path / "m.onnx", to="onnx", example=IDS)
    assert report.copies == 0
    model = onnx.load(str(tmp_path / "m.onnx"))
    (table,) = matrices(tmp_path / "m.onnx", rows)
    inputs = [one for one in model.graph.input if one.name != table]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    onnx.save(model, tmp_path / "constant.onnx")
    held = {
        name: int(subprocess.check_output([sys.executable, "-c", RESIDENT, str(tmp_path / f"{name}.onnx")], text=True))
        for name in ("m", "constant")
    }
    nbytes = 4 * rows * width
    assert held["m"] < 1.5 * nbytes < 1.8 * nbytes < held["constant"]


def test_the_table_is_no_input_that_a_caller_has_to_give(exported: tuple[Any, Path, ExportReport]) -> None:
    _, file, report = exported
    runner = session(file)
    assert tuple(one.name for one in runner.get_inputs()) == report.inputs
    assert [one.name for one in runner.get_overridable_initializers()] == matrices(file)


def test_a_float16_table_stays_a_constant(tmp_path: Path) -> None:
    """onnxruntime would cast an input to float32 at every call."""
    bowline.export(Plain().half(), tmp_path / "m.onnx", to="onnx", example=IDS, verify=False)
    assert [one.name for one in onnx.load(str(tmp_path / "m.onnx")).graph.input] == ["input_0"]


def test_onnxruntime_computes_the_same_at_any_size(exported: tuple[Any, Path, ExportReport]) -> None:
    model, file, report = exported
    runner = session(file)
    assert tuple(one.name for one in runner.get_inputs()) == report.inputs == ("input_ids", "attention_mask")
    for batch, length in ((1, 1), (5, 11)):
        inputs = tokens(model, batch, length)
        (got,) = runner.run(None, {name: one.numpy() for name, one in inputs.items()})
        np.testing.assert_allclose(got, logits(model, inputs).numpy(), atol=1e-4, rtol=0)
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-4


def test_the_audit_reads_the_file_as_tied(exported: tuple[Any, Path, ExportReport]) -> None:
    _, file, _ = exported
    read = read_onnx(LocalDirectory(file.parent), file.name)
    assert [head.tensor for head in read.heads] == [read.table]
    assert read.copies == ()


def test_an_llama_of_transformers_gets_one_initializer_too(tmp_path: Path, quiet_transformers: None) -> None:
    """Its head is a plain `nn.Linear` on three axes, of which onnxruntime would keep a transposed second matrix."""
    source = llama_directory(tmp_path / "llama")
    report = bowline.export(source, tmp_path / "llama.onnx", to="onnx")
    assert report.copies == 0
    assert "one initializer after onnxruntime's optimiser" in report.outcome
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-4


@pytest.mark.parametrize("house", ["bowline", "transformers"])
def test_a_t5_has_one_initializer_for_encoder_decoder_and_head(
    house: str, tmp_path: Path, quiet_transformers: None
) -> None:
    model: Any = t5()
    if house == "transformers":
        from transformers import T5Config, T5ForConditionalGeneration

        sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=ROWS, **sizes | {"decoder_start_token_id": 0})
        model = T5ForConditionalGeneration(config)
    shared = model.shared.weight
    assert shared is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.lm_head.weight
    file = tmp_path / "t5.onnx"
    report = bowline.export(model, file, to="onnx")
    runner = session(file, tmp_path / "optimised.onnx")
    assert len(matrices(file)) == len(matrices(tmp_path / "optimised.onnx")) == 1
    assert report.copies == 0 and report.nbytes < 1.02 * one_copy(model)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "input_ids": torch.randint(ROWS, (2, 9), generator=generator),
        "attention_mask": torch.ones(2, 9, dtype=torch.int64),
        "decoder_input_ids": torch.randint(ROWS, (2, 4), generator=generator),
    }
    (got,) = runner.run(None, {name: one.numpy() for name, one in inputs.items()})
    np.testing.assert_allclose(got, logits(model, inputs).numpy(), atol=1e-4, rtol=0)


def test_weights_in_a_file_of_their_own_and_an_opset(tmp_path: Path) -> None:
    report = bowline.export(Plain(), tmp_path / "m.onnx", to="onnx", example=IDS, external_data=True, opset=13)
    assert [path.name for path in report.files] == ["m.onnx", "m.onnx.data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx.data").stat().st_size == one_copy(Plain())
    assert onnx.load(str(tmp_path / "m.onnx"), load_external_data=False).opset_import[0].version == 13
    (got,) = session(tmp_path / "m.onnx").run(None, {"input_0": np.full((2, 5), 3)})
    np.testing.assert_allclose(got, Plain()(torch.full((2, 5), 3)).detach().numpy(), atol=1e-4)


def test_the_file_names_no_place_of_this_machine(exported: tuple[Any, Path, ExportReport]) -> None:
    assert str(Path(__file__).parents[2]).encode() not in exported[1].read_bytes()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"^to='onnx' needs {package}, which is not installed .*bowline-ties.onnx"):
        bowline.export(Plain(), tmp_path / "m.onnx", to="onnx", example=IDS)
    assert list(tmp_path.iterdir()) == []


def test_without_onnxruntime_an_export_that_is_not_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    report = bowline.export(Plain(), tmp_path / "m.onnx", to="onnx", example=IDS, verify=False)
    assert report.outcome.endswith("one initializer in the file")
    assert not report.verified


def test_the_data_file_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_text("mine")
    with pytest.raises(CheckpointError, match=r"m\.onnx\.data: exists"):
        bowline.export(Plain(), tmp_path / "m.onnx", to="onnx", example=IDS, external_data=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx.data"]


def test_an_opset_that_the_operators_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^opset=5: the operators of the model cannot be converted, expected \d+"):
        bowline.export(Plain(), tmp_path / "m.onnx", to="onnx", example=IDS, opset=5)
    assert list(tmp_path.iterdir()) == []
