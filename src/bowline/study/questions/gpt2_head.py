"""The question why GPT-2's lm_head is not a listed parameter, and what changes when only the head is tuned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from bowline.models import GPT2Config, GPT2LMHeadModel
from bowline.nn import untie_weights
from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.question import Numbers, Question
from bowline.study.small_models import build, held_out_loss, learn, mean_curve
from bowline.study.statistics import difference, mean, percent, standard_error, with_error
from bowline.study.study_text import prepared
from bowline.wording import joined

HEAD = "lm_head.weight"
MOVES = {"input embeddings": "input", "head": "head", "hidden states": "hidden"}
LOOKS = 6
SHARE = 3
"""Pretraining takes 1/3 of the steps, and so does tuning."""


def _run(experiments: Experiments) -> Numbers:
    setting = experiments.setting
    return {
        "names": experiments.unit(names),
        "tuning": [experiments.unit(tune, setting=setting.as_dict(), seed=seed) for seed in range(setting.seeds)],
        "few_tokens": setting.few_tokens,
    }


def names() -> dict[str, Any]:
    """Find where the head of GPT-2 small is listed, without allocating the model."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    return {
        "shape_of_head": list(model.lm_head.weight.shape),
        "shape_of_table": list(model.transformer.wte.weight.shape),
        "listed": HEAD in dict(model.named_parameters()),
        "listed_with_duplicates": HEAD in dict(model.named_parameters(remove_duplicate=False)),
        "in_state_dict": HEAD in model.state_dict(),
        "is_the_table": model.lm_head.weight is model.transformer.wte.weight,
    }


def tune(setting: dict[str, Any], seed: int, text: Path) -> dict[str, Any]:
    """Train a tied model, then tune only its head on a short text, once tied and once untied with a copy."""
    sizes = ExperimentSizes(**setting)
    data = prepared(text, "gpt2", sizes)
    general, special = data.batches(seed=seed), data.batches(seed=seed + 1000, tokens=sizes.few_tokens)
    before = build("gpt2", sizes, seed=seed)
    learn(before, general, sizes, steps=max(1, sizes.steps // SHARE), seed=seed)
    steps = max(1, sizes.steps // SHARE)
    at = sorted({0, *range(0, steps, max(1, steps // LOOKS)), steps})
    arms: dict[str, Any] = {}
    for name in ("tied", "untied"):
        model = copy.deepcopy(before)
        if name == "untied":
            untie_weights(model)
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)

        def look(model: GPT2LMHeadModel = model) -> dict[str, Any]:
            return {"special": _loss_of_training(model, special), "general": held_out_loss(model, general)}

        looks = learn(model, special, sizes, steps=steps, seed=seed, look=look, at=at)
        arms[name] = {"looks": looks, **_moved(before, model, next(iter(general.held_out())))}
    return arms


@torch.no_grad()
def _loss_of_training(model: GPT2LMHeadModel, batches: Any) -> float:
    return mean([float(model(**batches.at(step)).loss) for step in range(4)])


@torch.no_grad()
def _moved(before: GPT2LMHeadModel, after: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the change of each part, relative to its norm before."""

    def relative(old: torch.Tensor, new: torch.Tensor) -> float:
        return float((new - old).norm() / old.norm())

    before.eval()
    after.eval()
    ids = batch["input_ids"]
    return {
        "input": relative(before.transformer.wte.weight, after.transformer.wte.weight),
        "head": relative(before.lm_head.weight, after.lm_head.weight),
        "hidden": relative(before.transformer(ids).last_hidden_state, after.transformer(ids).last_hidden_state),
    }


def _plot(numbers: Numbers) -> Sheet:
    tuning = numbers["tuning"]
    groups = []
    for title, key in MOVES.items():
        bars = []
        for colour, name in enumerate(("tied", "untied")):
            found = [100 * seed[name][key] for seed in tuning]
            bars.append(
                Bar(
                    label=name,
                    value=mean(found),
                    error=standard_error(found),
                    note=f"{mean(found):.1f} %",
                    colour=colour,
                )
            )
        groups.append(Group(name=title, bars=bars))
    curves = []
    for colour, (name, key, label) in enumerate(
        (
            ("tied", "special", "tied: the tuned text"),
            ("untied", "special", "untied: the tuned text"),
            ("tied", "general", "tied: other text"),
            ("untied", "general", "untied: other text"),
        )
    ):
        steps = [look["step"] for look in tuning[0][name]["looks"]]
        y, error = mean_curve([[look[key] for look in seed[name]["looks"]] for seed in tuning])
        curves.append(Curve(label=label, x=steps, y=y, error=error, colour=colour))
    return Sheet(
        title="What moves when only GPT-2's head is tuned?",
        subtitle=f"requires_grad for lm_head.weight alone, on {numbers['few_tokens']} tokens; {len(tuning)} seeds, "
        "bands and whiskers are standard errors",
        panels=[
            Bars(title="How far each part goes", subtitle="‖after - before‖ / ‖before‖", x_label="%", groups=groups),
            Curves(title="What it does to the loss", y_label="loss, nats", curves=curves),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    found, tuning = numbers["names"], numbers["tuning"]
    places = [
        ("named_parameters()", found["listed"]),
        ("named_parameters(remove_duplicate=False)", found["listed_with_duplicates"]),
        ("state_dict()", found["in_state_dict"]),
    ]
    shown, hidden = [name for name, there in places if there], [name for name, there in places if not there]
    head, table = tuple(found["shape_of_head"]), tuple(found["shape_of_table"])
    one = (
        f"The weight of lm_head, {head}, is the very parameter of the embedding, {table}"
        if found["is_the_table"]
        else f"The weight of lm_head, {head}, is a parameter of its own"
    )
    missing = f", and missing from {joined(hidden)}" if hidden else ""
    first = f"{one}: it is in {joined(shown)}{missing}." if shown else f"{one}."
    moved = {name: [seed[name]["hidden"] for seed in tuning] for name in ("tied", "untied")}
    embeddings = [seed["tied"]["input"] for seed in tuning]
    general = {
        name: [seed[name]["looks"][-1]["general"] - seed[name]["looks"][0]["general"] for seed in tuning]
        for name in moved
    }
    gap = difference(general["tied"], general["untied"])
    cost = (
        "on other text the tied one loses more"
        if gap.clear and gap.value > 0
        else "on other text the tied one loses less"
        if gap.clear
        else "on other text the two lose the same within the error"
    )
    tied_moves = (
        f"moves the input embeddings by {percent(mean(embeddings))} and the hidden states by "
        f"{percent(mean(moved['tied']))}"
        if mean(embeddings) > 0
        else "does not move the input embeddings"
    )
    untied_moves = (
        f"where an untied copy moves the hidden states by {percent(mean(moved['untied']))}"
        if mean(moved["untied"]) > 0
        else "where an untied copy leaves both as they were"
    )
    changes = f"{with_error(general['tied'])} nats tied and {with_error(general['untied'])} untied"
    return f"{first} Tuning only the tied head {tied_moves}, {untied_moves}; {cost}, its loss changes by {changes}."


QUESTION = Question(
    name="gpt2-head",
    asks="Why is lm_head not a parameter of GPT-2, and does tuning it tune the embedding?",
    thread="Why is the lm_head layer in GPT2LMHeadModel not a parameter?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
