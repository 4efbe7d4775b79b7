"""The record of a question: an experiment, a figure of its numbers, and the conclusion from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bowline.plots.panels import Sheet
from bowline.study.experiments import Experiments

__all__ = ["Numbers", "Question"]

Numbers = dict[str, Any]
"""The measured numbers, in types of JSON. Figure and conclusion depend on nothing else."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question from a discussion thread.

    `run` measures. Each slow part of it is a unit of work, whose result is kept. `plot` and `conclusion` get only the
    numbers. `conclusion` returns two sentences, which say so if the numbers do not show the expected result.
    """

    name: str
    asks: str
    thread: str
    run: Callable[[Experiments], Numbers]
    plot: Callable[[Numbers], Sheet]
    conclusion: Callable[[Numbers], str]
