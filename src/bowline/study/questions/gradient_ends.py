"""The question where the shared matrix's gradient comes from: from the lookup or from the head."""

from __future__ import annotations

from typing import Any

from bowline.plots.panels import Curve, Curves, Sheet
from bowline.study.experiments import Experiments
from bowline.study.observed_run import runs
from bowline.study.question import Numbers, Question
from bowline.study.small_models import mean_curve
from bowline.study.statistics import mean, written

MORE = 1.5
"""One end counts as giving more if its norm is at least this many times the other's."""
INDEPENDENT = 0.2
"""Cosines up to this size count as nearly independent."""


def _run(experiments: Experiments) -> Numbers:
    found = {name: runs(experiments, tied=tied) for name, tied in (("tied", True), ("untied", False))}
    return {
        "steps": [look["step"] for look in found["tied"][0]["looks"]],
        **{name: [[look["split"] for look in run["looks"]] for run in each] for name, each in found.items()},
    }


def _ratios(seeds: list[list[dict[str, float]]]) -> list[list[float]]:
    return [[look["output"] / look["input"] for look in seed] for seed in seeds]


def _plot(numbers: Numbers) -> Sheet:
    def curve(label: str, values: list[list[Any]], colour: int) -> Curve:
        y, error = mean_curve(values)
        return Curve(label=label, x=numbers["steps"], y=y, error=error, colour=colour)

    tied = numbers["tied"]
    return Sheet(
        title="Where does the shared gradient come from?",
        subtitle="norms of what the head and the lookup add to one matrix's gradient, on one held-out batch; "
        "bands are standard errors over seeds",
        panels=[
            Curves(
                title="The two ends, tied",
                subtitle="before clipping",
                y_label="norm of the gradient",
                curves=[
                    curve("output: the head", [[look["output"] for look in seed] for seed in tied], 0),
                    curve("input: the lookup", [[look["input"] for look in seed] for seed in tied], 1),
                    curve("their sum", [[look["total"] for look in seed] for seed in tied], 2),
                ],
                log_x=True,
                log_y=True,
            ),
            Curves(
                title="Output over input",
                subtitle="untied, each is the gradient of its own matrix",
                y_label="ratio of norms",
                curves=[curve("tied", _ratios(tied), 0), curve("untied", _ratios(numbers["untied"]), 1)],
                references=[(1.0, "equal")],
                log_x=True,
                log_y=True,
            ),
            Curves(
                title="Do they pull one way?",
                subtitle="cosine of the two parts",
                y_label="cosine",
                curves=[curve("tied", [[look["cosine"] for look in seed] for seed in tied], 0)],
                references=[(0.0, "independent")],
                log_x=True,
            ),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    steps = numbers["steps"]
    ratios, _ = mean_curve(_ratios(numbers["tied"]))
    most = max(range(len(ratios)), key=lambda at: ratios[at])
    last = ratios[-1]
    who = (
        "mostly from the head"
        if mean(ratios) >= MORE and min(ratios) >= 1
        else "mostly from the lookup"
        if mean(ratios) <= 1 / MORE and max(ratios) <= 1
        else "from both ends, in a ratio that changes along training"
        if max(ratios) >= MORE
        else "from both ends about equally"
    )
    cosines, _ = mean_curve([[look["cosine"] for look in seed] for seed in numbers["tied"]])
    way = (
        "they pull the same way"
        if min(cosines) > INDEPENDENT
        else "they pull against each other"
        if max(cosines) < -INDEPENDENT
        else "they are nearly independent"
        if max(map(abs, cosines)) <= INDEPENDENT
        else "they agree at some steps and not at others"
    )
    return (
        f"The shared gradient comes {who}: the head's part is {written(ratios[0], 2)} times the lookup's before the "
        f"first step, {written(ratios[most], 2)} times at its most (step {steps[most]}) and {written(last, 2)} times "
        f"after step {steps[-1]}. As directions {way}: their cosine lies between {min(cosines):.2f} and "
        f"{max(cosines):.2f}."
    )


QUESTION = Question(
    name="gradient",
    asks="One matrix is trained from two ends: where does its gradient come from?",
    thread="BERT embeddings for padding token not 0?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
