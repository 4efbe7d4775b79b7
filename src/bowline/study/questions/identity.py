"""The question whether E E^T = I: the distance of E E^T from a multiple of I, at the draw and during training."""

from __future__ import annotations

from typing import Any

import numpy as np

from bowline import geometry
from bowline.plots.panels import Curve, Curves, Sheet
from bowline.study.experiments import Experiments
from bowline.study.observed_run import runs
from bowline.study.question import Numbers, Question
from bowline.study.small_models import mean_curve
from bowline.study.statistics import difference, mean, percent, with_error, written
from bowline.study.trained_table import MINILM, minilm, minilm_table

KEYS = ("identity_distance", "tight_frame_distance", "participation_ratio", "mean_cosine", "self_decoding")


def _run(experiments: Experiments) -> Numbers:
    tied, untied = runs(experiments, tied=True), runs(experiments, tied=False)
    tables = {
        "tied": _of(tied, "table"),
        "untied, input": _of(untied, "table"),
        "untied, output": _of(untied, "head"),
    }
    first = tied[0]["looks"][0]["table"]
    return {
        "steps": [look["step"] for look in tied[0]["looks"]],
        "vocab_size": experiments.setting.vocab_size,
        "hidden_size": experiments.setting.hidden_size,
        "bound": first["identity_bound"],
        "tables": tables,
        "trained": {MINILM: experiments.unit(table_of_minilm)} if minilm() else {},
    }


def _of(found: list[dict[str, Any]], end: str) -> dict[str, Any]:
    return {key: [[look[end][key] for look in run["looks"]] for run in found] for key in KEYS}


def table_of_minilm() -> dict[str, Any]:
    """Measure MiniLM's table in the same way."""
    place = minilm()
    assert place is not None, "asked only where it is there"
    table = minilm_table(place).astype(np.float32)
    rows = geometry.Rows(table)
    return {
        "rows": len(table),
        "hidden_size": table.shape[1],
        "identity_distance": geometry.identity_distance(rows),
        "identity_bound": geometry.identity_bound(*table.shape),
        "tight_frame_distance": geometry.tight_frame_distance(rows),
        "participation_ratio": geometry.participation_ratio(rows),
        "mean_cosine": geometry.mean_cosine(rows),
    }


def _plot(numbers: Numbers) -> Sheet:
    def curves(key: str, scale: float = 1.0) -> list[Curve]:
        found = []
        for colour, (name, table) in zip((0, 1, 3), numbers["tables"].items(), strict=True):
            y, error = mean_curve([[scale * value for value in seed] for seed in table[key]])
            found.append(Curve(label=name, x=numbers["steps"], y=y, error=error, colour=colour))
        return found

    return Sheet(
        title="Is E Eᵀ = I?",
        subtitle=f"tables of {numbers['vocab_size']} rows of {numbers['hidden_size']} in a small GPT-2; "
        "bands are standard errors over seeds",
        panels=[
            Curves(
                title="Distance from a multiple of I",
                subtitle="min ‖a E Eᵀ - I‖ / √V; 0 when they are equal",
                y_label="distance",
                curves=curves("identity_distance"),
                references=[(numbers["bound"], "the least for this shape")],
                log_x=True,
            ),
            Curves(
                title="Distance from a tight frame",
                subtitle="‖EᵀE / c - I‖ / √d, which could be 0",
                y_label="distance",
                curves=curves("tight_frame_distance"),
                log_x=True,
            ),
            Curves(
                title="Rows that decode to themselves",
                subtitle="argmax of eᵢ · e over all rows is i, as with E Eᵀ = I",
                y_label="% of the rows",
                curves=curves("self_decoding", 100.0),
                log_x=True,
                low=0,
                high=103,
            ),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    tied = numbers["tables"]["tied"]
    rows, width, bound = numbers["vocab_size"], numbers["hidden_size"], numbers["bound"]
    ends = [mean([seed[at] for seed in tied["identity_distance"]]) for at in (0, -1)]
    least = min(ends)
    reason = (
        f"its rank is at most {width} of {rows}, so its distance from a multiple of I is at least {bound:.4f}"
        if rows > width
        else "though its shape allows it"
    )
    answer = "Yes" if least < 0.01 else "No"
    trained = numbers["trained"].get(MINILM)
    also = f", and {trained['identity_distance']:.4f} in MiniLM" if trained else ""
    first = f"{answer}: {reason}; measured, it is {ends[0]:.4f} as drawn and {ends[1]:.4f} after training{also}."
    start, end = ([seed[at] for seed in tied["tight_frame_distance"]] for at in (0, -1))
    moved = difference(end, start)
    where = (
        "training moves the tied table away from it"
        if moved.clear and moved.value > 0
        else "training moves the tied table towards it"
        if moved.clear
        else "training moves the tied table neither way, within the error"
    )
    decoding = [mean([seed[at] for seed in tied["self_decoding"]]) for at in (0, -1)]
    others = {
        name: mean([seed[-1] for seed in numbers["tables"][name]["tight_frame_distance"]])
        for name in ("untied, output", "untied, input")
    }
    return (
        f"{first} The most that can hold is a tight frame, EᵀE = cI, and {where}: distance {with_error(start)} as "
        f"drawn, {with_error(end)} after training; in an untied model the output table ends at "
        f"{written(others['untied, output'])} and the input table at {written(others['untied, input'])}; the share of "
        f"tied rows that decode to themselves goes from {percent(decoding[0])} to {percent(decoding[1])}."
    )


QUESTION = Question(
    name="identity",
    asks="Is Embedding * Embedding^T = I necessarily true-ish?",
    thread="What is the tie_word_embeddings option exactly doing?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
