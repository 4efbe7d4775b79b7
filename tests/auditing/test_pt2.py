"""The audit of torch.export's programs (`.pt2`): one matrix, a copy of it, two matrices; verdicts against the truth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import bowline as bowline_package
from bowline.auditing import AuditReport, Severity, audit
from bowline.checkpoint import checkpoints_at, find_checkpoints, open_checkpoint
from bowline.checkpoint.weights import read_weights
from bowline.cli import app
from bowline.errors import CheckpointError, NoCheckpointError, UsageError
from bowline.tie import TieState
from tests.checkpoint.formats.onnx.test_graph import Memory
from tests.checkpoint.formats.pt2.pt2_files import TinyLM, entries, packed, program
from tests.checkpoints import GPT2, WTE, one, tied_gpt2
from tests.export.live_models import bert, gpt2, t5


def save(path: Path, kind: str = "tied") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(program(TinyLM(kind)))
    return path


def state(report: AuditReport) -> TieState | None:
    """The state of the head and the table."""
    assert report.evidence.main_tie is not None
    return report.evidence.main_tie.state


def bowline(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.mark.parametrize(
    ("kind", "truth"),
    [("tied", TieState.ALIAS), ("cloned", TieState.EQUAL), ("untied", TieState.DIVERGED)],
)
def test_the_verdict_on_what_torch_export_saves_is_the_truth(tmp_path: Path, kind: str, truth: TieState) -> None:
    report = audit(save(tmp_path / "model.pt2", kind))
    assert state(report) is truth
    codes = [finding.code for finding in report.findings if finding.severity is not Severity.INFO]
    assert codes == (["BW105"] if kind == "cloned" else [])
    assert report.evidence.outcomes == {}
    assert (report.evidence.declaration.embedding, report.evidence.declaration.head) == (
        "embed.weight",
        "lm_head.weight",
    )


def test_bw105_a_copy_is_counted_in_bytes(tmp_path: Path) -> None:
    found = one(save(tmp_path / "model.pt2", "cloned"), "BW105")
    assert found.message == "lm_head.weight repeats embed.weight value by value: 6.14 kB wasted"
    assert "before torch.export" in found.help


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_what_bowline_exports_is_one_matrix_stored_once(tmp_path: Path, make: object) -> None:
    assert callable(make)
    bowline_package.export(make(99), tmp_path / "model.pt2", to="pt2", verify=False)
    report = audit(tmp_path / "model.pt2")
    assert state(report) in (TieState.SHARED, TieState.ALIAS)
    assert all(tie.state in (TieState.SHARED, TieState.ALIAS) for tie in report.evidence.ties)
    assert not {"BW101", "BW105"} & {finding.code for finding in report.findings}


def test_a_head_without_a_name_of_its_own_is_its_node(tmp_path: Path) -> None:
    bowline_package.export(gpt2(99), tmp_path / "model.pt2", to="pt2", verify=False)
    declaration = audit(tmp_path / "model.pt2").evidence.declaration
    assert (declaration.embedding, declaration.head) == ("transformer.wte.weight", "linear")


def test_rows_are_those_of_the_module(tmp_path: Path) -> None:
    module = TinyLM("untied")
    with open_checkpoint(save(tmp_path / "model.pt2", "untied")) as checkpoint:
        for name in ("embed.weight", "lm_head.weight"):
            expected = module.state_dict()[name].numpy()
            assert (checkpoint.rows(name) == expected).all()
            assert (checkpoint.rows(name, 5, 9) == expected[5:9]).all()


def test_two_matrices_are_a_fault_if_the_config_beside_them_says_tied(tmp_path: Path) -> None:
    save(tmp_path / "model.pt2", "untied")
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "vocab_size": 96, "tie_word_embeddings": True}))
    found = one(tmp_path, "BW101")
    assert "but tie_word_embeddings is true" in found.message
    assert found.help.startswith("the graph computes with its own head")
    assert not found.fixable


def test_the_report_names_the_format(tmp_path: Path) -> None:
    result = bowline(save(tmp_path / "model.pt2"))
    assert result.exit_code == 0
    assert "one matrix, stored once" in result.output
    assert "pt2 (unknown family)" in result.output
    assert "flag       none: a program of torch.export has no flag" in result.output


def test_a_program_is_not_edited(tmp_path: Path) -> None:
    save(tmp_path / "model.pt2")
    with pytest.raises(UsageError, match=r"is a program of torch.export, expected safetensors"):
        bowline_package.open_checkpoint(tmp_path).edit().untie().plan()


def test_several_files_are_each_a_checkpoint(tmp_path: Path) -> None:
    for name in ("a.pt2", "b.pt2"):
        save(tmp_path / name)
    assert checkpoints_at(tmp_path) == find_checkpoints(tmp_path) == (tmp_path / "a.pt2", tmp_path / "b.pt2")
    with pytest.raises(NoCheckpointError, match="2 pt2 files, each a graph of its own"):
        open_checkpoint(tmp_path)


def test_a_model_beside_a_program_is_still_the_model(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    save(tmp_path / "model.pt2")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [WTE]


def test_a_program_on_the_hub_is_to_be_downloaded() -> None:
    with pytest.raises(NoCheckpointError, match=r"model.pt2: a program of torch.export on the Hub"):
        read_weights(Memory(model__pt2=b""))


@pytest.mark.parametrize("damage", ["cut", "package"])
def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_two(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "model.pt2")
    content = {name: raw for name, raw in entries(path.read_bytes()).items() if name.startswith(("archive", "byte"))}
    package = packed({"data/aotinductor/model/abc.wrapper.so": b"\x7fELF", **content})
    path.write_bytes(path.read_bytes()[:900] if damage == "cut" else package)
    result = bowline(path)
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert ("an AOTInductor package" in lines[0]) is (damage == "package")
    with pytest.raises(CheckpointError):
        audit(path)


def test_the_audit_of_a_program_imports_no_torch_and_runs_no_pickle(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt2", "cloned")
    content = entries(path.read_bytes())
    mark = tmp_path / "ran"
    content["data/sample_inputs/model.pt"] = f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode()
    path.write_bytes(packed(content))
    code = (
        "import sys, bowline\n"
        f"report = bowline.audit({str(path)!r})\n"
        "assert report.evidence.main_tie.state.name == 'EQUAL'\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert not mark.exists()


def test_a_tensor_of_a_subclass_is_not_compared(tmp_path: Path) -> None:
    def pickled(config: dict[str, dict[str, object]]) -> None:
        config["embed.weight"]["use_pickle"] = True

    raw = program(TinyLM("cloned"))
    content = entries(raw)
    document = json.loads(content["data/weights/model_weights_config.json"])
    pickled(document["config"])
    content["data/weights/model_weights_config.json"] = json.dumps(document).encode()
    (tmp_path / "model.pt2").write_bytes(packed(content))
    report = audit(tmp_path / "model.pt2")
    assert state(report) is None
    assert report.findings == ()


def test_a_bfloat16_program_is_compared(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(program(TinyLM("cloned").to(torch.bfloat16)))
    assert one(tmp_path / "model.pt2", "BW105").message.endswith("value by value: 3.07 kB wasted")
