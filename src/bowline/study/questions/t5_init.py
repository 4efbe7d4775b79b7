"""The question how to draw T5's table and head: the first loss and the training of each port's draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.initial_loss import FAMILIES, compare, recipes_of
from bowline.study.question import Numbers, Question
from bowline.study.small_models import build, held_out_loss, learn, look_steps, mean_curve
from bowline.study.statistics import difference, mean, with_error, written
from bowline.study.study_text import prepared
from bowline.wording import joined

DRAWS = 2
EXPLODES = 1.5
"""A first loss above this many times ln V counts as exploding; ln V is the loss of uniform predictions."""
TRAINED = {
    "transformers-t5, tied": "tied, table 1, logits scaled",
    "transformers-t5, untied": "untied, both 1",
    "transformers-t5-4.19, untied": "untied, head U(±d^-1/2)",
    "t5x, untied": "untied, head d^-1/2",
}
"""The draws that the thread discusses: torch's port now and before, and Google's own code."""
BOTH_ONE = "transformers-t5, untied"
SHARE = 4
"""The runs take 1/4 of the steps."""


def _run(experiments: Experiments) -> Numbers:
    setting = experiments.setting
    vocab = setting.sizes_vocab or FAMILIES["t5"].vocab_size
    width = setting.sizes_hidden or FAMILIES["t5"].hidden_size
    sizes = {"vocab_size": vocab, "hidden_size": width, "layers": setting.layers}
    rows = [
        experiments.unit(first_loss, recipe=recipe.name, tied=tied, **sizes)
        for recipe in recipes_of("t5")
        for tied in recipe.ties
    ]
    trained = {}
    for name in TRAINED:
        recipe, tie = name.split(", ")
        trained[name] = [
            experiments.unit(train, setting=setting.as_dict(), recipe=recipe, tied=tie == "tied", seed=seed)
            for seed in range(setting.seeds)
        ]
    return {**sizes, "rows": rows, "trained": trained}


def first_loss(recipe: str, tied: bool, vocab_size: int, hidden_size: int, layers: int) -> dict[str, Any]:
    """Predict and measure the first loss of one recipe."""
    sizes = {"vocab_sizes": [vocab_size], "hidden_sizes": [hidden_size]}
    row = next(compare("t5", [recipe], ties=[tied], num_layers=layers, draws=DRAWS, **sizes))
    return {
        "recipe": recipe,
        "tied": tied,
        "predicted": row.expected.loss,
        "measured": row.measured,
        "error": row.error,
        "uniform": row.expected.uniform,
        "logit_std": row.expected.width,
    }


def train(setting: dict[str, Any], recipe: str, tied: bool, seed: int, text: Path) -> dict[str, Any]:
    """Train a small T5, drawn by `recipe`, to fill holes in text."""
    sizes = ExperimentSizes(**setting)
    batches = prepared(text, "t5", sizes).batches(seed=seed)
    model = build("t5", sizes, seed=seed, recipe=recipe, tie_word_embeddings=tied)
    steps = max(1, sizes.steps // SHARE)
    looks = learn(
        model,
        batches,
        sizes,
        steps=steps,
        seed=seed,
        look=lambda: {"held_out": held_out_loss(model, batches)},
        at=look_steps(steps),
    )
    return {"looks": looks}


def _name(row: dict[str, Any]) -> str:
    return f"{row['recipe']}, {'tied' if row['tied'] else 'untied'}"


def _ends(numbers: Numbers, name: str) -> list[float]:
    return [run["looks"][-1]["held_out"] for run in numbers["trained"][name]]


def _plot(numbers: Numbers) -> Sheet:
    rows = sorted(numbers["rows"], key=lambda row: row["measured"])
    groups = [
        Group(
            name=_name(row),
            bars=[
                Bar(
                    label="tied" if row["tied"] else "untied",
                    value=row["measured"],
                    error=row["error"],
                    note=written(row["measured"]),
                    colour=0 if row["tied"] else 1,
                )
            ],
        )
        for row in rows
    ]
    curves = []
    for colour, (name, title) in enumerate(TRAINED.items()):
        runs = numbers["trained"][name]
        y, error = mean_curve([[look["held_out"] for look in run["looks"]] for run in runs])
        steps = [look["step"] for look in runs[0]["looks"]]
        curves.append(Curve(label=title, x=steps, y=y, error=error, colour=colour))
    return Sheet(
        title="How should T5's table and head be drawn?",
        subtitle=f"{numbers['vocab_size']} tokens, width {numbers['hidden_size']}, "
        f"{numbers['layers']} layers on the left; "
        "small models in training on the right, bands are standard errors over seeds",
        panels=[
            Bars(
                title="The loss before the first step",
                subtitle=f"mean of {DRAWS} draws",
                x_label="nats",
                groups=groups,
                references=[(rows[0]["uniform"], "ln V: knows nothing, and says so")],
                log=True,
            ),
            Curves(
                title="What training makes of it",
                y_label="held-out loss, nats",
                curves=curves,
                log_x=True,
                log_y=True,
            ),
        ],
        widths=(1.0, 1.1),
    )


def _conclusion(numbers: Numbers) -> str:
    rows = numbers["rows"]
    uniform = rows[0]["uniform"]
    both = next(row for row in rows if _name(row) == BOTH_ONE)
    far = [row for row in rows if row["measured"] > EXPLODES * uniform]
    turning = {row["recipe"] for row in far} & {row["recipe"] for row in rows if row not in far}
    names = [f"{'tied' if row['tied'] else 'untied'} {row['recipe']}" for row in far]
    beyond = (
        f"the draws that start beyond {EXPLODES:g} ln V are {joined(names)}"
        if far
        else (f"no draw starts beyond {EXPLODES:g} ln V")
    )
    depends = ", so the tie and the scale of the logits decide whether a recipe starts well" if turning else ""
    first = (
        f"With std 1 for table and head both, an untied T5 has a first loss of {written(both['measured'])}, where ln V "
        f"is {written(uniform)}; {beyond}{depends}"
    )
    ends = {name: _ends(numbers, name) for name in TRAINED}
    best = min(ends, key=lambda name: mean(ends[name]))
    gap = difference(ends[BOTH_ONE], ends[best]) if best != BOTH_ONE else None
    steps = numbers["trained"][BOTH_ONE][0]["looks"][-1]["step"]
    losses = joined([f"{with_error(found)} ({TRAINED[name]})" for name, found in ends.items()])
    verdict = (
        "that draw ends as the best of them, first loss or not"
        if gap is None
        else f"that draw is still behind the best, {TRAINED[best]}, by {written(gap.value)} nats"
        if gap.clear
        else f"by then that draw has caught up with the best, {TRAINED[best]}, within the error"
    )
    return f"{first}. After {steps} steps of training the held-out losses are {losses}: {verdict}."


QUESTION = Question(
    name="t5-init",
    asks="T5's ports draw table and head with different stds: which is right, and what has it to do with the tie?",
    thread="Large differences between T5 weight initialization in TF and torch",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
