"""`bowline export`: the lines that it prints, its options in its errors, and what it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bowline.cli import app
from bowline.errors import BowlineError, UsageError
from bowline.export import FORMATS
from tests.checkpoints import tied_gpt2
from tests.export.live_models import bert, gpt2

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # torch calls TorchScript old


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    gpt2(99).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["export", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_checkpoint_is_exported_and_the_report_printed(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.ts"
    lines = run(str(checkpoint), str(file), "--to", "torchscript")
    assert lines[0] == f"wrote {file} (torchscript)"
    assert lines[1] == ("tie: lm_head.weight <- transformer.wte.weight: one matrix in the file, shared when loaded")
    assert lines[2].startswith("size: ")
    assert lines[3] == "inputs: input_ids and attention_mask"
    assert lines[4].startswith("verified: outputs differ by at most 0, for inputs of (3, 7) and (2, 6)")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(torch.jit.load(str(file))(ids, ids * 0 + 1), gpt2(99).eval()(ids).logits)


def test_no_verify_is_said(checkpoint: Path, tmp_path: Path) -> None:
    lines = run(str(checkpoint), str(tmp_path / "m.ts"), "--to", "torchscript", "--head", "cloned", "--no-verify")
    assert "not verified: the export was not run" in lines
    assert any("the clone is a snapshot" in line for line in lines)


def refused(*arguments: str) -> BowlineError:
    with pytest.raises(BowlineError) as raised:
        CliRunner().invoke(app, ["export", *arguments], catch_exceptions=False)
    return raised.value


def test_errors_name_the_options_of_the_command(checkpoint: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "m")
    error = refused(str(checkpoint), out, "--to", "pt2", "--head", "cloned")
    assert error.message.startswith("--head cloned: ")
    error = refused(str(checkpoint), out, "--to", "torchscript", "--opset", "18")
    assert error.message.startswith("--opset 18: has no meaning")


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    source = tied_gpt2(tmp_path / "model", architectures=["HomemadeForCausalLM"], model_type="homemade")
    error = refused(str(source), str(tmp_path / "m.onnx"), "--to", "onnx")
    assert isinstance(error, UsageError)
    assert "neither Bowline nor transformers' AutoModelForCausalLM loads it" in error.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_unknown_family_without_transformers_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tied_gpt2(tmp_path / "model", architectures=["HomemadeForCausalLM"], model_type="homemade")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(str(source), str(tmp_path / "m.ts"), "--to", "torchscript").help == "pip install transformers"


def test_a_directory_that_is_missing_is_an_error_of_one_line(tmp_path: Path) -> None:
    assert str(tmp_path) in refused(str(tmp_path / "none"), str(tmp_path / "m.ts"), "--to", "torchscript").message


def test_a_layout_for_transformers_is_written_by_the_same_command(tmp_path: Path) -> None:
    bert(99).save_pretrained(tmp_path / "bert")
    lines = run(str(tmp_path / "bert"), str(tmp_path / "out"), "--to", "hf")
    assert any("transformers-5" in line for line in lines)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_command_knows_every_format() -> None:
    from bowline.cli.export import ExportFormat

    assert tuple(one.value for one in ExportFormat) == FORMATS


def test_formats_of_files_load_no_torch(tmp_path: Path) -> None:
    source = tied_gpt2(tmp_path / "model")
    code = (
        "import sys, bowline\n"
        f"try:\n    bowline.export({str(source)!r}, {str(tmp_path / 'out')!r}, to='hf')\n"
        "except bowline.errors.BowlineError:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
        "import bowline.export.gguf\n"
        "assert callable(bowline.export), 'the function, whatever was imported of its room'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
