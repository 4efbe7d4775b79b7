"""The question about BERT's decoder: the parts of the head, and a shared decoder against a cloned one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bowline.models import BertForMaskedLM
from bowline.nn import tie_weights, untie_weights
from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.question import Numbers, Question
from bowline.study.small_models import Later, build, held_out_loss, learn, mean_curve
from bowline.study.statistics import difference, mean, percent, standard_error, with_error, written
from bowline.study.study_text import prepared

LOOKS = 6
SHARE = 3
"""Each of the two phases, pretraining and training after the cloning, takes 1/3 of the steps."""


def _run(experiments: Experiments) -> Numbers:
    setting = experiments.setting
    return {"seeds": [experiments.unit(drift, setting=setting.as_dict(), seed=seed) for seed in range(setting.seeds)]}


def drift(setting: dict[str, Any], seed: int, text: Path) -> dict[str, Any]:
    """Train a tied BERT, then continue twice: once with the decoder shared, once with it cloned."""
    sizes = ExperimentSizes(**setting)
    data = prepared(text, "bert", sizes)
    batches = data.batches(seed=seed)
    before = build("bert", sizes, seed=seed)
    first = max(1, sizes.steps // SHARE)
    learn(before, batches, sizes, steps=first, seed=seed)
    second = max(1, sizes.steps // SHARE)
    at = sorted({0, *range(0, second, max(1, second // LOOKS)), second})
    arms: dict[str, Any] = {}
    for name in ("shared", "cloned"):
        model = copy.deepcopy(before)
        if name == "cloned":
            untie_weights(model)

        def look(model: BertForMaskedLM = model) -> dict[str, Any]:
            return {"held_out": held_out_loss(model, batches), **_apart(model)}

        looks = learn(model, Later(batches, first), sizes, steps=second, seed=seed, look=look, at=at)
        arms[name] = {"looks": looks}
        if name == "cloned":
            tie_weights(model, on_conflict="source")
            arms[name]["tied_again"] = held_out_loss(model, batches)
        else:
            arms["head"] = _head(model, batches, data.counts)
    return arms


@torch.no_grad()
def _apart(model: BertForMaskedLM) -> dict[str, float]:
    table, decoder = model.bert.embeddings.word_embeddings.weight, model.cls.predictions.decoder.weight
    cosines = torch.nn.functional.cosine_similarity(table, decoder, dim=1)
    return {"distance": float((table - decoder).norm() / table.norm()), "cosine": float(cosines.median())}


@torch.no_grad()
def _head(model: BertForMaskedLM, batches: Any, counts: Any) -> dict[str, Any]:
    """Measure the parts of the head, and the share of predictions that stay the same without each part."""
    head = model.cls.predictions
    model.eval()
    agree, same_space, total = 0, 0, 0
    for batch in batches.held_out():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = model.bert(**inputs).last_hidden_state[batch["labels"] != -100]
        logits = head.transform(hidden) @ head.decoder.weight.T
        best = (logits + head.decoder.bias).argmax(1)
        agree += int((logits.argmax(1) == best).sum())
        same_space += int(((hidden @ head.decoder.weight.T + head.decoder.bias).argmax(1) == best).sum())
        total += len(best)
    seen = counts > 0
    unigram = np.log(counts[seen] / counts.sum())
    bias = head.decoder.bias.numpy()[seen]
    return {
        "transform_parameters": sum(each.numel() for each in head.transform.parameters()),
        "bias_parameters": head.decoder.bias.numel(),
        "decoder_parameters": head.decoder.weight.numel(),
        "bias_follows_frequency": float(np.corrcoef(bias, unigram)[0, 1]),
        "same_without_bias": agree / total,
        "same_without_transform": same_space / total,
    }


def _curves(numbers: Numbers, arm: str, key: str) -> tuple[list[int], list[float], list[float]]:
    seeds = [seed[arm]["looks"] for seed in numbers["seeds"]]
    y, error = mean_curve([[look[key] for look in looks] for looks in seeds])
    return [look["step"] for look in seeds[0]], y, error


def _plot(numbers: Numbers) -> Sheet:
    def curve(arm: str, key: str, label: str, colour: int) -> Curve:
        x, y, error = _curves(numbers, arm, key)
        return Curve(label=label, x=x, y=y, error=error, colour=colour)

    losses = {
        "shared": [seed["shared"]["looks"][-1]["held_out"] for seed in numbers["seeds"]],
        "cloned": [seed["cloned"]["looks"][-1]["held_out"] for seed in numbers["seeds"]],
        "cloned, tied again by a loader": [seed["cloned"]["tied_again"] for seed in numbers["seeds"]],
    }
    bars = [
        Bar(label=name, value=mean(found), error=standard_error(found), note=f"{mean(found):.2f}", colour=colour)
        for colour, (name, found) in enumerate(losses.items())
    ]
    return Sheet(
        title="BERT's decoder: shared with the embedding, or cloned from it?",
        subtitle=f"a small BERT, trained tied, then further both ways; {len(numbers['seeds'])} seeds, "
        "bands and whiskers are standard errors",
        panels=[
            Curves(
                title="How far decoder and embedding are apart",
                subtitle="‖W - E‖ / ‖E‖",
                x_label="step after the cloning",
                y_label="relative distance",
                curves=[curve("shared", "distance", "shared", 0), curve("cloned", "distance", "cloned", 1)],
            ),
            Curves(
                title="Held-out loss",
                subtitle="of the same batches",
                x_label="step after the cloning",
                y_label="nats per hidden token",
                curves=[curve("shared", "held_out", "shared", 0), curve("cloned", "held_out", "cloned", 1)],
            ),
            Bars(
                title="At the end",
                subtitle="a loader that ties drops the trained decoder",
                x_label="held-out loss, nats per hidden token",
                groups=[Group(name="", bars=bars)],
                points=True,
            ),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    seeds = numbers["seeds"]
    distance = [seed["cloned"]["looks"][-1]["distance"] for seed in seeds]
    cosine = [seed["cloned"]["looks"][-1]["cosine"] for seed in seeds]
    shared, cloned = ([seed[arm]["looks"][-1]["held_out"] for seed in seeds] for arm in ("shared", "cloned"))
    again = [seed["cloned"]["tied_again"] for seed in seeds]
    steps = seeds[0]["cloned"]["looks"][-1]["step"]
    gap = difference(cloned, shared)
    verdict = (
        "which is equal within the error"
        if not gap.clear
        else "so that the clone is the better one"
        if gap.value < 0
        else "so that the clone is the worse one"
    )
    apart = (
        f"A clone is only a beginning: after {steps} further steps decoder and embedding are {percent(mean(distance))} "
        f"of the embedding's norm apart (median cosine of a row {written(mean(cosine), 2)})"
        if mean(distance) > 0.01
        else f"The clone stays where it was: after {steps} further steps the two are {percent(mean(distance))} apart"
    )
    loss = f"with a held-out loss of {with_error(cloned)} cloned and {with_error(shared)} shared, {verdict}"
    lost = difference(again, cloned)
    tied_again = (
        f"a loader that ties them again makes {with_error(again)} of it"
        if lost.clear
        else f"a loader that ties them again makes no difference beyond the error ({with_error(again)})"
    )
    head = {key: mean([seed["head"][key] for seed in seeds]) for key in seeds[0]["head"]}
    return (
        f"{apart}, {loss}; {tied_again}. Of the head, the transform ({head['transform_parameters']:,.0f} parameters) "
        f"and the output-only bias ({head['bias_parameters']:,.0f}) are its own: without the bias "
        f"{percent(head['same_without_bias'])} of the predictions stay, without the transform "
        f"{percent(head['same_without_transform'])}, and the bias correlates with the log frequency of its token at "
        f"{written(head['bias_follows_frequency'], 2)}."
    )


QUESTION = Question(
    name="bert-head",
    asks="How are the decoder's weights of BERT's head determined, and is a cloned decoder trained further?",
    thread="Understanding BertLMPredictionHead",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
