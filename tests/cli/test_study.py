"""`bowline study`: what it prints, and what it refuses in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bowline.cli.study import study
from bowline.errors import UsageError
from bowline.study.experiments import Experiments
from bowline.study.question import Question
from bowline.study.questions.question_list import QUESTIONS
from tests.study.test_framework import _conclusion, _plot, _run

app = typer.Typer()
app.command()(study)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'bowline-ties[plot]'")
    question = Question(name="toy", asks="How much?", thread="none", run=_run, plot=_plot, conclusion=_conclusion)
    monkeypatch.setitem(QUESTIONS, "toy", question)


@pytest.mark.usefixtures("toy")
def test_each_answer_is_printed_with_its_seconds(tmp_path: Path) -> None:
    result = run("toy", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 0
    assert re.match(r"toy \(\d+ s\)\n  How much\?\n  They are \[2, 4\]. That is all.\n", result.stdout)
    assert "answered 1 question in " in result.stdout and f"the report: {tmp_path}/study.md" in result.stdout
    assert result.stderr == ""  # nothing but the answers in a pipe


def test_the_questions_can_be_listed() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(QUESTIONS)


def test_without_a_directory_it_says_so() -> None:
    error = run("flag").exception
    assert isinstance(error, UsageError) and "--out is missing" in str(error)


def test_a_wrong_name_is_told_before_any_work(tmp_path: Path) -> None:
    error = run("flags", "--out", str(tmp_path / "new")).exception
    assert isinstance(error, UsageError) and "'flags': no such question" in str(error)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("toy")
def test_an_interrupted_study_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Experiments, function: Any, **arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiments, "unit", interrupted)
    result = run("toy", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "run the same command again to continue" in result.stderr
