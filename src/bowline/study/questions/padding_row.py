"""The question why BERT's padding row is not zero, and which policies keep it at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bowline.models import BertForMaskedLM
from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.question import Numbers, Question
from bowline.study.small_models import build, held_out_loss, learn, mean_curve
from bowline.study.statistics import difference, mean, standard_error, with_error, written
from bowline.study.study_text import Padded, prepared
from bowline.wording import joined

POLICIES = {
    "none": "none (the default)",
    "zeroed": "its gradient is dropped",
    "masked": "its logit is -inf",
    "untied": "a head of its own",
}
LOOKS = 8
SHARE = 4
"""The runs take 1/4 of the steps."""


def _run(experiments: Experiments) -> Numbers:
    setting = experiments.setting
    return {
        "policies": {
            policy: [
                experiments.unit(drift, setting=setting.as_dict(), policy=policy, seed=seed)
                for seed in range(setting.seeds)
            ]
            for policy in POLICIES
        },
        "formula": experiments.unit(formula, setting=setting.as_dict()),
    }


def _built(sizes: ExperimentSizes, pad: int, policy: str, seed: int) -> BertForMaskedLM:
    options: dict[str, Any] = {"pad_token_id": pad}
    if policy == "masked":
        options["pad_logit"] = "mask"
    if policy == "untied":
        options["tie_word_embeddings"] = False
    model: BertForMaskedLM = build("bert", sizes, seed=seed, **options)
    if policy == "untied":  # the same weights as the tied model at the start
        with torch.no_grad():
            model.cls.predictions.decoder.weight.copy_(model.bert.embeddings.word_embeddings.weight)
    if policy == "zeroed":
        keep = torch.ones(sizes.vocab_size, 1)
        keep[pad] = 0.0
        model.bert.embeddings.word_embeddings.weight.register_hook(lambda gradient: gradient * keep)
    return model


def drift(setting: dict[str, Any], policy: str, seed: int, text: Path) -> dict[str, Any]:
    """Train a small BERT on padded sentences, and measure the padding row."""
    sizes = ExperimentSizes(**setting)
    data = prepared(text, "bert", sizes)
    pad = data.pad
    batches = Padded(data.batches(seed=seed), pad=pad, seed=seed)
    model = _built(sizes, pad, policy, seed)
    unseen = torch.from_numpy(data.counts == 0)
    unseen[pad] = False
    steps = max(1, sizes.steps // SHARE)
    at = sorted({0, *range(0, steps, max(1, steps // LOOKS)), steps})
    labels = sum(int((batches.at(step)["labels"] == pad).sum()) for step in range(steps))

    def look() -> dict[str, Any]:
        return _row(model, batches, pad, unseen)

    looks = learn(model, batches, sizes, steps=steps, seed=seed, look=look, at=at)
    return {"looks": looks, "held_out": held_out_loss(model, batches), "labels_that_are_padding": labels}


@torch.no_grad()
def _row(model: BertForMaskedLM, batches: Padded, pad: int, unseen: torch.Tensor) -> dict[str, Any]:
    table, head = model.bert.embeddings.word_embeddings.weight, model.cls.predictions.decoder.weight
    batch = next(iter(batches.held_out()))
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    chance = logits[batch["labels"] != -100].softmax(-1)[:, pad].mean()
    others = torch.nn.functional.cosine_similarity(head[pad], head[unseen], dim=1) if unseen.any() else None
    defined = others is not None and bool(head[pad].norm() > 0)
    return {
        "input_norm": float(table[pad].norm()),
        "output_norm": float(head[pad].norm()),
        "median_norm": float(table.norm(dim=1).median()),
        "chance": float(chance),
        "cosine_to_unseen": float(others.mean()) if defined and others is not None else None,
    }


def formula(setting: dict[str, Any], text: Path) -> dict[str, Any]:
    """Compare the padding row's gradient in a tied model with (1/N) sum_t p_t(pad) h_t over N labelled positions."""
    sizes = ExperimentSizes(**setting)
    data = prepared(text, "bert", sizes)
    batches = Padded(data.batches(seed=0), pad=data.pad, seed=0)
    model = _built(sizes, data.pad, "none", 0).eval()
    batch = batches.at(0)
    model(**batch).loss.backward()
    weight = model.bert.embeddings.word_embeddings.weight
    assert weight.grad is not None, "backward has been run"
    given = weight.grad[data.pad]
    with torch.no_grad():
        head = model.cls.predictions
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = head.transform(model.bert(**inputs).last_hidden_state[batch["labels"] != -100])
        chances = (hidden @ head.decoder.weight.T + head.decoder.bias).softmax(-1)[:, data.pad]
        said = (chances[:, None] * hidden).mean(0)
    return {"norm": float(given.norm()), "error": float((given - said).norm() / given.norm())}


def _ends(numbers: Numbers, policy: str, key: str) -> list[float]:
    return [run["looks"][-1][key] for run in numbers["policies"][policy]]


def _plot(numbers: Numbers) -> Sheet:
    curves = []
    for colour, (policy, title) in enumerate(POLICIES.items()):
        found = numbers["policies"][policy]
        steps = [look["step"] for look in found[0]["looks"]]
        y, error = mean_curve([[look["input_norm"] for look in run["looks"]] for run in found])
        curves.append(Curve(label=title, x=steps, y=y, error=error, colour=colour))
    found = numbers["policies"]["none"]
    y, error = mean_curve([[look["median_norm"] for look in run["looks"]] for run in found])
    curves.append(
        Curve(label="the median row", x=[look["step"] for look in found[0]["looks"]], y=y, error=error, colour=7)
    )
    chances = [
        Group(
            name=title,
            bars=[
                Bar(
                    label="",
                    value=mean(_ends(numbers, policy, "chance")),
                    error=standard_error(_ends(numbers, policy, "chance")),
                    note=written(mean(_ends(numbers, policy, "chance")), 2),
                    colour=colour,
                )
            ],
        )
        for colour, (policy, title) in enumerate(POLICIES.items())
        if policy != "masked"
    ]
    losses = [
        Group(
            name=title,
            bars=[
                Bar(
                    label="",
                    value=mean([run["held_out"] for run in numbers["policies"][policy]]),
                    error=standard_error([run["held_out"] for run in numbers["policies"][policy]]),
                    note=f"{mean([run['held_out'] for run in numbers['policies'][policy]]):.2f}",
                    colour=colour,
                )
            ],
        )
        for colour, (policy, title) in enumerate(POLICIES.items())
    ]
    return Sheet(
        title="Why is the padding row not zero?",
        subtitle=f"a small tied BERT, sentences filled up with padding, {len(found)} seeds; "
        "bands and whiskers are standard errors",
        panels=[
            Curves(
                title="The norm of the padding row",
                subtitle="as it is looked up",
                y_label="norm",
                curves=curves,
            ),
            Bars(
                title="The chance that is given to padding",
                subtitle="mean over hidden tokens; 0 where its logit is -inf",
                x_label="probability",
                groups=chances,
                log=True,
            ),
            Bars(
                title="What it costs",
                subtitle="held-out loss at the end",
                x_label="nats per hidden token",
                groups=losses,
                points=True,
            ),
        ],
        widths=(1.2, 1.0, 1.0),
    )


def _conclusion(numbers: Numbers) -> str:
    drift_to, median = _ends(numbers, "none", "input_norm"), _ends(numbers, "none", "median_norm")
    labels = sum(run["labels_that_are_padding"] for runs in numbers["policies"].values() for run in runs)
    error = numbers["formula"]["error"]
    moved = mean(drift_to) > 0.05 * mean(median)
    movement = (
        f"drifts from 0 to a norm of {with_error(drift_to)} (median row {written(mean(median))})"
        if moved
        else f"stays near 0 ({with_error(drift_to)}, median row {written(mean(median))})"
    )
    why = "is the softmax's, (1/N) Σ p(pad) h" if error < 1e-3 else "is not (1/N) Σ p(pad) h"
    labelled = "never once a label" if labels == 0 else f"a label {labels} times"
    first = (
        f"Under the tie the padding row {movement} though padding was {labelled}: the gradient that moves it {why}, "
        f"to a relative error of {written(error, 2)}"
    )
    still = [
        POLICIES[policy] for policy in POLICIES if policy != "none" and max(_ends(numbers, policy, "input_norm")) == 0
    ]
    ratio = mean(_ends(numbers, "zeroed", "chance")) / mean(_ends(numbers, "none", "chance"))
    compared = (
        f"a zero row is given {written(ratio, 2)} times the chance of one that drifts"
        if ratio > 1.5 or ratio < 0.67
        else f"a zero row is given much the same chance as one that drifts ({written(ratio, 2)} times)"
    )
    losses = {policy: [run["held_out"] for run in runs] for policy, runs in numbers["policies"].items()}
    gaps = {policy: difference(losses[policy], losses["none"]) for policy in POLICIES if policy != "none"}
    apart = [f"{gap.value:+.2g} ({POLICIES[policy]})" for policy, gap in gaps.items() if gap.clear]
    cost = (
        f"beside the default the held-out loss changes beyond the error by {joined(apart)}"
        if apart
        else "no policy changes the held-out loss beyond the error"
    )
    kept = f"It stays zero where {joined(still)}" if still else "No policy keeps it at zero"
    return f"{first}. {kept}; {compared}, and {cost}."


QUESTION = Question(
    name="padding-row",
    asks="Why is BERT's embedding of the padding token not zero, and how could a gradient reach it?",
    thread="BERT embeddings for padding token not 0?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
