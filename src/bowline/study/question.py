"""What a question is: an experiment with numbers, a figure of them, and two sentences that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bowline.plots.panels import Sheet
from bowline.study.bench import Bench

__all__ = ["Numbers", "Question"]

Numbers = dict[str, Any]
"""What was measured, as JSON has it: the figure and the sentences need nothing else."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of the threads.

    `run` measures; each part that takes time is a unit of the bench, so that it is kept. `plot` and `conclusion` see
    the numbers alone: `conclusion` gives two sentences, and says so where the numbers do not show what is expected.
    """

    name: str
    asks: str
    thread: str
    run: Callable[[Bench], Numbers]
    plot: Callable[[Numbers], Sheet]
    conclusion: Callable[[Numbers], str]
