"""Writing the answers: `study.json` for programs, `study.md` for people, and a figure for each question."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bowline import __version__
from bowline.checkpoint.durable.whole_file import write_whole
from bowline.errors import UsageError
from bowline.plots.figure_style import save
from bowline.plots.panels import draw_sheet
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.question import Numbers, Question

__all__ = ["VERSION", "Answer", "earlier", "write_figure", "write_report"]

VERSION = 1
"""The version of study.json. It changes when a key changes its meaning or is removed."""
RECORD = "study.json"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question: its numbers and the conclusion from them.

    `seconds` is the time that its units of work took when they were run, even for another question. `elapsed` is the
    time of this call. `code` is the hash of the code that measured.
    """

    name: str
    asks: str
    thread: str
    conclusion: str
    figure: str
    seconds: float
    elapsed: float
    code: str
    numbers: Numbers


def write_figure(question: Question, numbers: Numbers, directory: Path) -> str:
    """Draw the question's figure into `directory`, and return the file's name."""
    name = f"{question.name}.svg"
    staged = directory / f".{os.getpid()}.{name}"
    save(draw_sheet(question.plot(numbers)), staged)
    staged.replace(directory / name)
    return name


def earlier(directory: Path, setting: ExperimentSizes) -> list[dict[str, Any]]:
    """Return the answers for the same setting from the record in `directory`.

    Raises:
        UsageError: the record has another version.
    """
    try:
        found = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise UsageError(
            f"{directory / RECORD}: expected a study's record of version {VERSION}", help="give another directory"
        )
    answers = found.get("answers") if found.get("setting") == setting.as_dict() else None
    return [each for each in answers or () if isinstance(each, dict)]


def write_report(directory: Path, setting: ExperimentSizes, answers: Sequence[dict[str, Any]]) -> None:
    """Write `study.json` and `study.md`, each atomically."""
    machine = {
        "bowline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    record = {"version": VERSION, "setting": setting.as_dict(), "made_with": machine, "answers": list(answers)}
    write_whole(directory / RECORD, json.dumps(record, indent=1) + "\n")
    write_whole(directory / "study.md", _markdown(setting, machine, answers))


def _markdown(setting: ExperimentSizes, machine: dict[str, Any], answers: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# What the tie does, measured",
        "",
        f"Setting `{setting.name}`: small models of {setting.layers} layers, width {setting.hidden_size}, "
        f"{setting.vocab_size} tokens, trained for up to {setting.steps} steps of {setting.tokens} tokens of the "
        f"standard library's source, {setting.seeds} seeds. ± is the standard error over seeds; two results differ "
        "where a t-test of their differences, seed by seed, says so at 95 %. "
        f"Bowline {machine['bowline']}, torch {machine['torch']}, Python {machine['python']}, {machine['threads']} "
        f"thread{'s' * (machine['threads'] != 1)}.",
        "",
    ]
    for answer in answers:
        lines += [
            f"## {answer['asks']}",
            "",
            f"*{answer['thread']}*",
            "",
            answer["conclusion"],
            "",
            f"![{answer['name']}]({answer['figure']})",
            "",
            f"`bowline study {answer['name']}`, {answer['seconds']:.0f} s",
            "",
        ]
    return "\n".join(lines)
