"""The difference of two heads as an adapter: against numpy's singular values, PEFT, and the merge that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from typer.testing import CliRunner

from bowline.cli import app
from bowline.edit import open_checkpoint
from bowline.edit.adapter.extraction import extract_adapter
from bowline.errors import CheckpointError, TieError, UsageError
from tests.checkpoints import GPT2, HEAD, OWN, T5, WTE, table, write
from tests.parity.adapter_cases import H_, Base, Case, loaded, logits, make_base, saved_adapter

pytestmark = [pytest.mark.usefixtures("quiet_transformers"), pytest.mark.filterwarnings("ignore")]

UNTIED = {**GPT2, "tie_word_embeddings": False}


def models(tmp_path: Path, difference: np.ndarray[Any, Any]) -> tuple[Path, Path]:
    """A tied GPT-2, and an untied one whose head differs from it by this."""
    base = write(tmp_path / "base", {WTE: table()}, GPT2)
    return base, write(tmp_path / "tuned", {WTE: table(), HEAD: table() + difference}, UNTIED)


def product(place: Path) -> np.ndarray[Any, Any]:
    tensors = load_file(place / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.lm_head.lora_{side}.weight"].double().numpy() for side in "AB")
    found: np.ndarray[Any, Any] = b @ a
    return found


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_adapter_is_the_best_one_of_its_rank(tmp_path: Path, rank: int) -> None:
    difference = np.random.default_rng(1).standard_normal(table().shape).astype(np.float32)
    base, tuned = models(tmp_path, difference)
    report = extract_adapter(base, tuned, tmp_path / "lora", rank=rank)
    u, s, vt = np.linalg.svd((table() + difference).astype(np.float64) - table())
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    assert np.allclose(product(tmp_path / "lora"), best, rtol=0, atol=1e-5)
    assert report.energy == pytest.approx((s[:rank] ** 2).sum() / (s**2).sum(), rel=1e-6)
    assert report.others == ()


def test_a_low_rank_difference_is_held_whole(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    rows, width = table().shape
    difference = generator.standard_normal((rows, 2)) @ generator.standard_normal((2, width))
    base, tuned = models(tmp_path, difference.astype(np.float32))
    report = extract_adapter(base, tuned, tmp_path / "lora", rank=2)
    assert report.energy > 1 - 1e-9 and report.largest_left < 1e-5 * report.largest
    assert "a LoRA of rank 2 at lm_head" in str(report)


def test_what_a_merge_put_in_is_taken_out_and_put_in_again(tmp_path: Path) -> None:
    base = make_base("llama", True, tmp_path / "base")
    saved_adapter(Case("llama", {"target_modules": [H_]}, "", ""), base, place := tmp_path / "adapter")
    with open_checkpoint(base.place) as checkpoint:
        checkpoint.edit().merge(place).commit(tmp_path / "tuned")
    extract_adapter(base.place, tmp_path / "tuned", tmp_path / "lora", rank=4)
    before = logits(loaded(base, place))
    assert torch.allclose(logits(peft_model(base, tmp_path / "lora")), before, rtol=0, atol=1e-5)
    with open_checkpoint(base.place) as checkpoint:
        checkpoint.edit().merge(tmp_path / "lora").commit(tmp_path / "again")
    again = type(base.model).from_pretrained(tmp_path / "again", dtype=torch.float64).eval()
    assert torch.allclose(logits(again), before, rtol=0, atol=1e-5)


def peft_model(base: Base, place: Path) -> Any:
    return PeftModel.from_pretrained(base.model, place).eval()


def test_an_embedding_is_extracted_as_peft_reads_it(tmp_path: Path) -> None:
    base = make_base("llama", False, tmp_path / "base")
    options = {"target_modules": ["embed_tokens"]}
    saved_adapter(Case("llama", options, "", "", tied=False), base, place := tmp_path / "adapter")
    with open_checkpoint(base.place) as checkpoint:
        checkpoint.edit().merge(place).commit(tmp_path / "tuned")
    extract_adapter(base.place, tmp_path / "tuned", tmp_path / "lora", rank=4, end="embedding")
    before = logits(loaded(base, place))
    assert torch.allclose(logits(peft_model(base, tmp_path / "lora")), before, rtol=0, atol=1e-5)


def test_other_tensors_that_differ_are_named(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {WTE: table(), "transformer.ln_f.weight": np.ones(8, np.float32)}, GPT2)
    other = {WTE: table(), HEAD: OWN, "transformer.ln_f.weight": np.zeros(8, np.float32)}
    tuned = write(tmp_path / "tuned", other, UNTIED)
    report = extract_adapter(base, tuned, tmp_path / "lora", rank=1)
    assert report.others == ("transformer.ln_f.weight",)
    assert "1 other tensor differs, which the adapter does not hold: transformer.ln_f.weight" in str(report)


def test_equal_heads_have_no_adapter(tmp_path: Path) -> None:
    base, tuned = models(tmp_path, np.zeros_like(table()))
    with pytest.raises(TieError, match="the two are equal, so there is no adapter"):
        extract_adapter(base, tuned, tmp_path / "lora", rank=1)
    assert not (tmp_path / "lora").exists()


def test_a_difference_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    difference = np.zeros_like(table())
    difference[3, 3] = np.nan
    with pytest.raises(TieError, match="the difference is not finite"):
        extract_adapter(*models(tmp_path, difference), tmp_path / "lora", rank=1)


def test_tables_of_other_sizes_have_no_difference(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {WTE: table()}, GPT2)
    tuned = write(tmp_path / "tuned", {WTE: table(), HEAD: OWN[:-1]}, UNTIED)
    with pytest.raises(TieError, match="they have no difference"):
        extract_adapter(base, tuned, tmp_path / "lora", rank=1)


@pytest.mark.parametrize("rank", [0, 10**4])
def test_an_impossible_rank_is_refused(tmp_path: Path, rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank}: expected 1 to"):
        extract_adapter(*models(tmp_path, np.ones_like(table())), tmp_path / "lora", rank=rank)


def test_a_directory_with_files_is_not_overwritten(tmp_path: Path) -> None:
    base, tuned = models(tmp_path, np.ones_like(table()))
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "mine").write_text("kept")
    with pytest.raises(CheckpointError):
        extract_adapter(base, tuned, tmp_path / "lora", rank=1)
    assert [path.name for path in (tmp_path / "lora").iterdir()] == ["mine"]


def test_heads_with_and_without_t5s_scale_are_not_compared(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"shared.weight": table()}, {**T5, "d_model": table().shape[1]})
    untied = {**T5, "d_model": table().shape[1], "tie_word_embeddings": False}
    tuned = write(tmp_path / "tuned", {"shared.weight": table(), HEAD: OWN}, untied)
    with pytest.raises(TieError, match="one of the two heads carries the logits' scale"):
        extract_adapter(base, tuned, tmp_path / "lora", rank=1)


def test_the_command_prints_the_report_and_a_refusal_exits_with_1(tmp_path: Path) -> None:
    base, tuned = models(tmp_path, np.ones_like(table()))
    arguments = ["extract", str(base), str(tuned), str(tmp_path / "lora"), "--rank", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "a LoRA of rank 1 at lm_head" in result.output
    refused = CliRunner().invoke(app, ["extract", str(base), str(base), str(tmp_path / "none"), "--rank", "1"])
    assert refused.exit_code == 1 and "the two are equal" in refused.output
