"""All questions by name, in the order of a report: those without training come first."""

from __future__ import annotations

from collections.abc import Iterable

from bowline.errors import UsageError
from bowline.study.question import Question
from bowline.study.questions import (
    bert_head,
    gpt2_head,
    gradient_ends,
    identity,
    nearest_row,
    padding_row,
    t5_init,
    tie_word_embeddings,
    tied_untied,
)

__all__ = ["QUESTIONS", "chosen"]

QUESTIONS: dict[str, Question] = {
    module.QUESTION.name: module.QUESTION
    for module in (
        tie_word_embeddings,
        t5_init,
        gpt2_head,
        nearest_row,
        bert_head,
        padding_row,
        identity,
        tied_untied,
        gradient_ends,
    )
}


def chosen(names: Iterable[str]) -> list[Question]:
    """Return the questions of these names, in the order of `QUESTIONS`, or all questions if no name is given.

    Raises:
        UsageError: a name that no question has.

    Example:
        >>> [question.name for question in chosen(["gradient", "flag"])]
        ['flag', 'gradient']
    """
    wanted = set(names)
    unknown = sorted(wanted - QUESTIONS.keys())
    if unknown:
        raise UsageError(
            f"{unknown[0]!r:.60}: no such question, expected one of {', '.join(QUESTIONS)}",
            help="leave out the names to answer all questions",
        )
    return [question for name, question in QUESTIONS.items() if not wanted or name in wanted]
