"""The log: lines that a program reads, and what a person sees."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bowline.errors import CheckpointError
from bowline.train import Trainer
from bowline.train.loop.run_log import Log, line, shown
from tests.train.runs import Counting, run, settings, tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_log_is_one_json_object_a_line_and_the_history(tmp_path: Path) -> None:
    _, result = run(tmp_path)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert tuple(json.loads(text) for text in lines) == result.history


def test_the_gradient_is_split_where_there_is_a_tie(tmp_path: Path) -> None:
    _, result = run(untie_at_step=11)
    splits: list[Any] = [record.get("gradient_split") for record in result.history]
    assert all(split["output"] > 0 and split["input"] > 0 for split in splits[:4])
    assert splits[4:] == [None] * 5


def test_records_beyond_the_step_and_half_a_line_are_cut_off(tmp_path: Path) -> None:
    kept = [{"step": 1, "loss": 3.0}, {"step": 5, "loss": 2.0}]
    text = "".join(json.dumps(record) + "\n" for record in [*kept, {"step": 9, "loss": 1.0}])
    (tmp_path / "log.jsonl").write_text(text + '{"step": 3, "lo')
    with Log(tmp_path, up_to=5) as log:
        log.write({"step": 6, "loss": 1.5})
    assert [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        *kept,
        {"step": 6, "loss": 1.5},
    ]


def test_a_log_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        Log(tmp_path / "missing", up_to=0)


def test_tensorboard_gets_each_number_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Writer:
        def __init__(self, directory: str, purge_step: int) -> None:
            told.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def close(self) -> None:
            told.append("closed")

    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Log(tmp_path, up_to=4) as log:
        log.write({"step": 5, "loss": 2.5, "tie": "tied", "gradient_split": {"output": 1.0}})
    assert told == [
        (str(tmp_path / "tensorboard"), 5),
        ("loss", 2.5, 5),
        ("gradient_split/output", 1.0, 5),
        "closed",
    ]


def test_without_tensorboard_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run(tmp_path, steps=2)
    assert not (tmp_path / "tensorboard").exists()


# --- a person -------------------------------------------------------------------------------------------------------


def test_a_line_has_what_a_person_asks_for() -> None:
    record = {
        "step": 40,
        "loss": 4.3125,
        "tokens_per_second": 12345.6,
        "held_out_loss": 4.0,
        "perplexity": 54.598,
        "memory_mb": 512.4,
        "tie": "tied",
        "gradient_split": {"output": 2.4, "input": 0.1, "total": 2.4, "cosine": 0.0},
    }
    wanted = "step   40/2000  loss 4.312  held-out 4.000 (perplexity 54.6)  12,346 tokens/s  512 MB  tied  "
    assert line(record, 2000) == wanted + "gradient output/input 24"


def test_in_a_pipe_each_record_is_a_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with shown(24) as show:
        Trainer(tiny(), Counting(), settings(), log=show.record, on_step=show.step).train()
    lines = out.getvalue().splitlines()
    assert "is one parameter, with weight decay" in lines[0]
    assert [text[:10] for text in lines[1:3]] == ["step  1/24", "step  3/24"]
    assert len(lines) == 10
    assert "\x1b" not in out.getvalue()
    assert err.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with shown(24) as show:
        Trainer(tiny(), Counting(), settings(), log=show.record, on_step=show.step).train()
    assert out.getvalue() == ""
    assert "24/24" in err.getvalue()
    assert "held-out perplexity" in err.getvalue()
    assert "tokens/s" in err.getvalue()
    assert "tied" in err.getvalue()


def test_a_terminal_and_a_pipe_each_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bowline train | tee log`."""
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with shown(24) as show:
        Trainer(tiny(), Counting(), settings(), log=show.record, on_step=show.step).train()
    assert len(out.getvalue().splitlines()) == 10
    assert "24/24" in err.getvalue()
