"""Running a study: questions are answered one after another, and an interrupted study continues."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bowline.errors import UsageError
from bowline.plots.figure_style import plain_style
from bowline.study.experiment_sizes import QUICK, ExperimentSizes
from bowline.study.experiments import Experiments, code_digest
from bowline.study.question import Question
from bowline.study.questions.question_list import QUESTIONS, chosen
from bowline.study.study_report import RECORD, Answer, earlier, write_figure, write_report

__all__ = ["study"]


def study(
    questions: Iterable[str | Question] = (),
    *,
    out: str | os.PathLike[str],
    setting: ExperimentSizes = QUICK,
    answered: Callable[[Answer], None] = lambda answer: None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Answer]:
    """Answer questions by measurement; write `study.md`, `study.json` and a figure per question into `out`.

    Slow units of work run once per configuration and are kept in `out/units`. The report is written after each answer.
    It also has the earlier answers in `out` to other questions, if they have the same setting and code.

    Args:
        questions: names or `Question`s; all questions by default.
        out: a new or empty directory, or the directory of an earlier study.
        setting: the sizes.
        answered: called with each answer.
        tell: called with a line for each unit of work that begins.

    Raises:
        UsageError: an unknown question, a directory that holds something else or cannot be written, or no matplotlib.
            It is raised before any work is done.
    """
    asked = list(questions)
    own = [each for each in asked if isinstance(each, Question)]
    names = [each for each in asked if isinstance(each, str)]
    wanted = [*own, *(chosen(names) if names or not own else ())]
    with plain_style():
        pass  # the figures need matplotlib: raise now if it is missing
    directory = _opened(Path(out))
    before = [each for each in earlier(directory, setting) if _stands(each)]
    answers: list[Answer] = []
    for question in wanted:
        answer = _answer(question, Experiments(directory, setting, tell=tell))
        answers.append(answer)
        write_report(directory, setting, _merged(before, answers))
        answered(answer)
    return answers


def _answer(question: Question, experiments: Experiments) -> Answer:
    start = time.perf_counter()
    numbers = question.run(experiments)
    return Answer(
        name=question.name,
        asks=question.asks,
        thread=question.thread,
        conclusion=question.conclusion(numbers),
        figure=write_figure(question, numbers, experiments.directory),
        seconds=round(experiments.seconds, 3),
        elapsed=round(time.perf_counter() - start, 3),
        code=_code(question),
        numbers=numbers,
    )


def _code(question: Question) -> str:
    return code_digest(inspect.unwrap(question.run).__module__)


def _stands(answer: dict[str, Any]) -> bool:
    """True if an answer of the record comes from the present code."""
    question = QUESTIONS.get(str(answer.get("name")))
    return question is not None and answer.get("code") == _code(question)


def _merged(before: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    found = {each["name"]: each for each in before} | {each.name: asdict(each) for each in answers}
    order = [*QUESTIONS, *(name for name in found if name not in QUESTIONS)]
    return [found[name] for name in order if name in found]


def _opened(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in directory.iterdir()}
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror or error}", help="give a writable directory") from error
    if there and not there & {RECORD, "units", "text"}:
        raise UsageError(
            f"{directory}: holds {sorted(there)[0]} and no earlier study, expected a new or empty directory",
            help="give another directory",
        )
    return directory
