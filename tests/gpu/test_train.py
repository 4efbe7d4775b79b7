"""`bowline train` on a GPU: each family, in bf16, killed and resumed; and what it saved, read on the CPU."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline import train
from bowline.train import Trainer
from tests.train.runs import Counting, settings, tiny

TEXT = Path(train.__file__).parent
"""A hundred thousand characters."""


def bowline(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "bowline", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "lstm"])
@pytest.mark.parametrize("bf16", [False, True])
def test_each_family_learns_and_its_file_is_read_on_a_cpu(family: str, bf16: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    usual = ["--device", "cuda", "--steps", "30", "--vocab-size", "600", "--evaluate-every", "10"]
    extra = ["--bf16"] if bf16 else []
    bowline("train", "--family", family, "--data", str(TEXT), "--out", str(out), *usual, *extra)
    held_out = [record["perplexity"] for record in records(out) if "perplexity" in record]
    assert held_out[-1] < held_out[0]
    bowline("audit", str(out))


class StopError(Exception):
    """What ends a run here."""


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"activation_checkpointing": True}], ids=str)
def test_a_run_that_was_ended_ends_where_one_that_was_not_does(tmp_path: Path, options: dict[str, Any]) -> None:
    def on_step(step: int) -> None:
        if step == 13:
            raise StopError

    def trainer(out: str, **more: Any) -> Trainer:
        return Trainer(tiny().to("cuda"), Counting(), settings(**options), out=tmp_path / out, **more)

    whole = trainer("whole").train()
    with pytest.raises(StopError):
        trainer("parts", on_step=on_step).train()
    parts = trainer("parts", resume=True).train()
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert [one["step"] for one in parts.history] == [one["step"] for one in whole.history]


def test_the_losses_of_a_run_are_those_of_the_cpu() -> None:
    model = tiny(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    there = copy.deepcopy(model).to("cuda")
    one, other = (Trainer(which, Counting(), settings()).train() for which in (model, there))
    assert other.loss == pytest.approx(one.loss, rel=1e-3)
    assert one.history[0]["gradient_split"].keys() == other.history[0]["gradient_split"].keys()
    assert torch.cuda.max_memory_allocated() > 0
