"""Two processes under torchrun, on gloo over loopback: each step's loss is that of one process with both batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.train import Trainer
from tests.torchrun import under_torchrun
from tests.train.ddp_worker import OPTIONS
from tests.train.runs import Counting, run, settings, tiny
from tests.train.texts import library

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
TOLERANCE = 1e-4
"""Relative, after 24 steps: the sum of two gradients is rounded otherwise, and Adam's quotient makes more of it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ddp")
    under_torchrun("tests.train.ddp_worker", str(out))
    return out


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any]:
    return run(**OPTIONS)


def test_each_steps_loss_is_that_of_one_process(place: Path, alone: tuple[Any, Any]) -> None:
    records = [json.loads(text) for text in (place / "whole" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 25))
    losses, wanted = ([record["loss"] for record in history] for history in (records, alone[1].history))
    assert losses == pytest.approx(wanted, rel=TOLERANCE)
    assert records[0]["loss"] == pytest.approx(alone[1].history[0]["loss"], rel=1e-6)


def test_dropout_is_that_of_the_batch_and_not_of_the_process(place: Path, alone: tuple[Any, Any]) -> None:
    """The first loss has one, and agrees; without, it would be another."""
    still = tiny(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    without = Trainer(still, Counting(), settings(**{**OPTIONS, "steps": 1, "untie_at_step": None})).train()
    first = json.loads((place / "whole" / "log.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - without.loss) > 1e-4 > abs(first["loss"] - alone[1].history[0]["loss"])


def test_both_processes_end_with_one_model_which_is_that_of_one_process(place: Path, alone: tuple[Any, Any]) -> None:
    zero, one = (torch.load(place / f"{rank}.pt") for rank in range(2))
    for name, tensor in alone[0].state_dict().items():
        assert torch.equal(zero["state"][name], one["state"][name])
        torch.testing.assert_close(zero["state"][name], tensor, rtol=1e-2, atol=1e-3)
    assert zero["held_out"] == one["held_out"] == pytest.approx(alone[1].held_out_loss, rel=TOLERANCE)


def test_a_signal_to_one_process_ends_both_behind_the_same_step(place: Path) -> None:
    said = [(place / f"{rank}.txt").read_text() for rank in range(2)]
    assert said[0].startswith("ended by SIGTERM after step 8: the checkpoint of step 8 is complete")
    assert said[1].startswith("ended by a signal after step 8: the checkpoint of step 8 is complete")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_no_thread_of_the_group_outlives_the_interpreter(place: Path) -> None:
    """One that does, and lets go of a tensor then, asks an interpreter that is gone: the process would be aborted."""
    assert [(place / f"{rank}.threads").read_text() for rank in range(2)] == ["", ""]


def test_a_run_of_two_processes_goes_on_on_one(place: Path, alone: tuple[Any, Any]) -> None:
    _, result = run(place / "ended", resume=True, **OPTIONS)
    losses, wanted = ([record["loss"] for record in history] for history in (result.history, alone[1].history))
    assert losses == pytest.approx(wanted, rel=TOLERANCE)


def test_the_command_trains_one_model_and_says_so_once(tmp_path: Path) -> None:
    text, out = library(tmp_path / "text"), tmp_path / "run"
    small = ["--vocab-size", "300", "--length", "16", "--batch-size", "2", "--accumulation", "2", "--steps", "3"]
    done = under_torchrun("bowline", "train", "--family", "gpt2", "--data", str(text), "--out", str(out), *small)
    assert [line.split()[0] for line in done.stdout.splitlines()].count("held-out") == 1
    assert done.stdout.count("the model is in") == done.stdout.count("step 3/3") == 1
    assert audit(out).clean
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 3]
