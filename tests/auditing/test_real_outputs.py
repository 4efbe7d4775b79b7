"""What tools leave on disk of SmolLM2-135M, a trained tied model: the audit's verdict beside the truth."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.outputs import OUTPUTS, Judged, Output, judge, missing, sources, write

from bowline.auditing import audit
from bowline.auditing.audit_report import AuditReport
from bowline.auditing.quantised_comparison import stored_bytes
from bowline.auditing.rules import Severity
from bowline.auditing.verdict import verdict
from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.quantised import recognise

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
GGUF = ROOT / ".peers" / "real" / "wheel"
MLX = ROOT / ".peers" / "mlx-lm-0.32.2" / "bin" / "python"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Any]


def serious(report: AuditReport) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity is not Severity.INFO]


def rewritten(smollm2: Path, place: Path, change: Callable[[Tensors], Tensors], **config: Any) -> AuditReport:
    """The audit of the model with changed tensors and config."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(smollm2, place, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(change(load_file(smollm2 / "model.safetensors")), place / "model.safetensors", {"format": "pt"})
    written: Mapping[str, Any] = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**written, **config}))
    return audit(place)


@pytest.fixture(scope="module")
def made(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The model cut to its first layers, whose ends are the trained ones: tied, untied, and with a copy as head."""
    place = tmp_path_factory.mktemp("sources")
    yield sources(smollm2, place)
    shutil.rmtree(place)


@pytest.fixture(autouse=True)
def room(tmp_path: Path) -> Iterator[None]:
    """Each of these checkpoints has half a gigabyte, and none is kept."""
    yield
    shutil.rmtree(tmp_path)


def test_as_it_is(smollm2: Path) -> None:
    report = audit(smollm2)
    assert verdict(report.evidence) == "one matrix, stored once: tied in every loader"
    assert serious(report) == []


def test_merged_into_a_head_of_its_own(smollm2: Path, tmp_path: Path) -> None:
    """What PEFT's merge leaves of a LoRA on the head once the model was untied, with the flag as it was."""
    import torch

    def merged(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        low = torch.randn(49_152, 8, generator=generator) @ torch.randn(8, 576, generator=generator)
        return {**tensors, HEAD: tensors[EMBEDDING] + 0.02 * low}

    report = rewritten(smollm2, tmp_path / "merged", merged)
    assert verdict(report.evidence).startswith("head and embedding differ, but the flag says tied: dropped in")
    assert serious(report) == ["BW101"]
    assert "a merged low-rank delta of rank 8" in report.findings[0].message


@pytest.mark.parametrize(
    ("part", "wrapper"),
    [
        ("_orig_mod.", "torch.compile"),
        ("_fsdp_wrapped_module.", "FullyShardedDataParallel"),
        ("module.", "DataParallel, DistributedDataParallel or DeepSpeed"),
    ],
)
def test_names_that_a_wrapper_changed(smollm2: Path, tmp_path: Path, part: str, wrapper: str) -> None:
    report = rewritten(smollm2, tmp_path / "wrapped", lambda tensors: {part + name: at for name, at in tensors.items()})
    assert verdict(report.evidence).startswith("neither head nor embedding is stored: random in transformers 4")
    found = next(finding for finding in report.findings if finding.code == "BW406")
    assert f"which {wrapper} adds" in found.message


def test_trained_untied_and_saved(smollm2: Path, tmp_path: Path) -> None:
    def untied(tensors: Tensors) -> Tensors:
        head = tensors[EMBEDDING].clone()
        head[1000:] *= 1.01
        return {**tensors, HEAD: head}

    report = rewritten(smollm2, tmp_path / "untied", untied, tie_word_embeddings=False)
    assert verdict(report.evidence) == "two matrices: kept in every loader"
    assert serious(report) == []


def test_the_gguf_file_that_it_came_from() -> None:
    files = sorted(GGUF.rglob("*.gguf"))
    if not files:
        pytest.skip("the wheel is not here: run `make real`")
    report = audit(files[0])
    assert verdict(report.evidence) == "one matrix, stored once: tied in llama.cpp"
    assert serious(report) == []


@pytest.mark.parametrize("options", [[], ["-q", "--q-bits", "4"]], ids=["float", "4 bits"])
def test_what_mlx_lm_converts(smollm2: Path, tmp_path: Path, options: list[str]) -> None:
    if not MLX.exists():
        pytest.skip("mlx-lm is not here: run `make sweep-mlx`")
    place = tmp_path / "mlx"
    command = [str(MLX), "-m", "mlx_lm", "convert", "--hf-path", str(smollm2), "--mlx-path", str(place), *options]
    subprocess.run(command, check=True, capture_output=True)
    report = audit(place)
    assert verdict(report.evidence).startswith("one matrix, stored once")
    assert serious(report) == []


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_what_another_tool_writes(output: Output, made: dict[str, Path], minilm: Path, tmp_path: Path) -> None:
    """The audit's verdict is the truth that the tool itself tells of its output, once it has loaded it again."""
    if reason := missing(output):
        pytest.skip(reason)
    place = tmp_path / "out"
    facts = write(output, {**made, "minilm": minilm}[output.source], place)
    assert output.facts.items() <= facts.items()
    assert judge(place) == Judged(says=output.says, codes=output.codes)
    if "values" in facts:
        assert_values_are_those_of_the_tool(place, facts["values"])


def assert_values_are_those_of_the_tool(place: Path, values: list[list[float]]) -> None:
    """The head as it is dequantised here and by the tool: rows 0, 4096, ... and their first 128 values."""
    with open_checkpoint(place) as checkpoint:
        stored = stored_bytes(checkpoint)
        head = recognise(HEAD, checkpoint.tensors, checkpoint.config, checkpoint.metadata, stored)
        assert head is not None
        for number, row in enumerate(values):
            found, _ = head.rows(stored, 4096 * number, 4096 * number + 1)
            assert np.abs(found[0, :128] - row).max() <= 1e-6 * np.abs(found).max()
