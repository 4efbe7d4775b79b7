"""A run that was ended and resumed is the run that was not: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.train import Trainer
from tests.train.runs import Counting, run, same, settings, tiny, without_times

KILLS = int(os.environ.get("BOWLINE_KILLS", "60")) // 12


class StopError(Exception):
    """What ends a run here."""


def ended_at(step: int, out: Path, **options: Any) -> None:
    def on_step(now: int) -> None:
        if now == step:
            raise StopError

    with pytest.raises(StopError):
        Trainer(tiny(), Counting(), settings(**options), out=out, resume=True, on_step=on_step).train()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation": 2},
        {"untie_at_step": 11},
        {"untie_at_step": 11, "embedding_rate": 3.0},
        {"untie_at_step": 10},
        {"bf16": True},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
def test_a_resumed_run_has_the_weights_and_the_log_of_one_that_was_not_ended(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, result = run(tmp_path / "whole", **options)
    for step in (3, 8, 13, 19):  # before the first checkpoint, at a record, between records, before the last one
        ended_at(step, tmp_path / "ended", **options)
    resumed, again = run(tmp_path / "ended", resume=True, **options)
    assert same(resumed, whole)
    assert without_times(again.history) == without_times(result.history)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "ended")]
    assert without_times(map(json.loads, logs[1])) == without_times(map(json.loads, logs[0]))
    assert (again.loss, again.held_out_loss) == (result.loss, result.held_out_loss)


def test_without_a_directory_the_run_is_the_same(tmp_path: Path) -> None:
    kept, alone = run(tmp_path), run()
    assert same(kept[0], alone[0])
    assert without_times(kept[1].history) == without_times(alone[1].history)


def test_a_finished_run_that_is_resumed_is_only_loaded(tmp_path: Path) -> None:
    whole, result = run(tmp_path)
    again, same_result = run(tmp_path, resume=True)
    assert same(again, whole)
    assert same_result == result


def test_a_tied_matrix_is_one_again_and_so_is_its_state(tmp_path: Path) -> None:
    ended_at(13, tmp_path)
    model = tiny()
    trainer = Trainer(model, Counting(), settings(), out=tmp_path, resume=True)
    trainer.train()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(trainer.optimizer.state) == len(list(model.parameters()))


def test_killed_at_random_moments_it_ends_as_one_that_nobody_killed() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-m", "tests.train.kill_loop", "--kills", str(KILLS)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= KILLS


# --- ended on purpose -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_whole_step_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    def on_step(step: int) -> None:
        if step == 8:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    trainer = Trainer(tiny(), Counting(), settings(), out=tmp_path / "ended", on_step=on_step)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    wanted = (
        f"^ended by {name} after step 8: the checkpoint of step 8 is complete, and a resumed run continues from it$"
    )
    with pytest.raises(KeyboardInterrupt, match=wanted):
        trainer.train()
    assert signal.getsignal(number) is before
    resumed, again = run(tmp_path / "ended", resume=True)
    whole, result = run()
    assert same(resumed, whole)
    assert without_times(again.history) == without_times(result.history)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    def on_step(step: int) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Trainer(tiny(), Counting(), settings(), out=tmp_path, on_step=on_step).train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_without_a_directory_ctrl_c_says_that_nothing_is_saved() -> None:
    trainer = Trainer(tiny(), Counting(), settings(), on_step=lambda step: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="ended by Ctrl-C after step 1: nothing is saved"):
        trainer.train()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_another_configuration_is_refused_and_what_differs_is_named(tmp_path: Path) -> None:
    ended_at(8, tmp_path)
    wanted = r"was saved with other settings: steps was 24 and is 30; learning_rate was 0.01 and is 0.02"
    with pytest.raises(UsageError, match=wanted):
        run(tmp_path, resume=True, steps=30, learning_rate=0.02)


def test_what_is_written_and_how_often_may_differ(tmp_path: Path) -> None:
    whole, _ = run()
    ended_at(8, tmp_path)
    resumed, _ = run(tmp_path, resume=True, log_every=5, save_every=6, keep=1)
    assert same(resumed, whole)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000024"]


def test_a_directory_with_a_run_is_not_begun_in_again(tmp_path: Path) -> None:
    ended_at(8, tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(UsageError, match="already holds a run of 5 steps"):
        run(tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_nothing_to_resume_is_a_beginning(tmp_path: Path) -> None:
    assert same(run(tmp_path / "new", resume=True)[0], run()[0])


def test_dropout_is_drawn_from_the_step_and_not_from_what_came_before(tmp_path: Path) -> None:
    """The global generator may be anywhere when a run begins or goes on."""
    ended_at(8, tmp_path)
    torch.rand(17)
    model = tiny()
    torch.rand(5)
    Trainer(model, Counting(), settings(), out=tmp_path, resume=True).train()
    assert same(model, run()[0])
