"""The question whether h . e_i finds the nearest row: how often product, cosine and distance find the same row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiments import Experiments
from bowline.study.observed_run import runs
from bowline.study.question import Numbers, Question
from bowline.study.row_search import searches
from bowline.study.small_models import mean_curve
from bowline.study.statistics import difference, mean, percent, standard_error
from bowline.study.trained_table import MINILM, minilm, minilm_table

MOSTLY = 0.9
"""Two searches count as the same from this share of agreement on."""


def _run(experiments: Experiments) -> Numbers:
    ends = {}
    for name, tied in (("tied", True), ("untied", False)):
        found = runs(experiments, tied=tied)
        ends[name] = {
            "steps": [look["step"] for look in found[0]["looks"]],
            "seeds": [[look["search"] for look in run["looks"]] for run in found],
        }
    rows = {MINILM: experiments.unit(rows_of_minilm, queries=experiments.setting.queries)} if minilm() else {}
    return {**ends, "rows": rows, "vocab_size": experiments.setting.vocab_size}


def rows_of_minilm(queries: int) -> dict[str, Any]:
    """Search with rows of MiniLM's table as queries, once for the row itself and once for the nearest other row."""
    place = minilm()
    assert place is not None, "asked only where it is there"
    table = torch.from_numpy(minilm_table(place).astype(np.float32))
    chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:queries]
    return {
        "itself": searches(table[chosen], table, chosen),
        "others": searches(table[chosen], table, but=chosen),
        "queries": len(chosen),
    }


def _last(end: dict[str, Any], name: str, at: int = -1) -> list[float]:
    return [seed[at][name] for seed in end["seeds"]]


def _plot(numbers: Numbers) -> Sheet:
    tied = numbers["tied"]
    pairs = (
        ("product_is_cosine", "product and cosine"),
        ("product_is_distance", "product and distance"),
        ("cosine_is_distance", "cosine and distance"),
    )
    curves = []
    for colour, (key, label) in enumerate(pairs):
        y, error = mean_curve([[100 * look[key] for look in seed] for seed in tied["seeds"]])
        curves.append(Curve(label=label, x=tied["steps"], y=y, error=error, colour=colour))
    groups = []
    for name in ("tied", "untied"):
        bars = []
        for colour, (key, label) in enumerate((("product", "product"), ("cosine", "cosine"), ("distance", "distance"))):
            found = _last(numbers[name], f"{key}_right")
            bars.append(
                Bar(
                    label=label,
                    value=100 * mean(found),
                    error=100 * standard_error(found),
                    note=f"{100 * mean(found):.1f} %",
                    colour=colour + 3,
                )
            )
        groups.append(Group(name=name, bars=bars))
    return Sheet(
        title="Is h · eᵢ a search for the nearest row?",
        subtitle=f"hidden states of held-out text against the {numbers['vocab_size']} rows of the head; "
        "bands and whiskers are standard errors over seeds",
        panels=[
            Curves(
                title="How often two searches find one row",
                subtitle="a tied GPT-2 in training",
                y_label="% of hidden states",
                curves=curves,
                log_x=True,
                low=0,
                high=103,
            ),
            Bars(
                title="How often each finds the token that came",
                subtitle="after training",
                x_label="% of hidden states",
                groups=groups,
            ),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    tied = numbers["tied"]
    first, last = (mean(_last(tied, "product_is_cosine", at)) for at in (0, -1))
    by_distance = mean(_last(tied, "product_is_distance"))
    answer = {
        (True, True): "Yes, nearly",
        (False, True): "By distance yes, by cosine no",
        (True, False): "By cosine yes, by distance no",
    }.get((last >= MOSTLY, by_distance >= MOSTLY), "Only in part" if max(last, by_distance) >= 0.5 else "No")
    spread = percent(mean(_last(tied, "norm_spread")))
    finding = (
        f"{answer}: in the trained tied model the row with the largest product is the row of the largest cosine for "
        f"{percent(last)} of the hidden states ({percent(first)} before training) and the row at the least distance "
        f"for {percent(by_distance)}, with row norms that spread by {spread} of their mean"
    )
    product, cosine = _last(tied, "product_right"), _last(tied, "cosine_right")
    gap = difference(product, cosine)
    shares = f"{percent(mean(product))} and {percent(mean(cosine))}"
    verdict = (
        f"product and cosine find the next token equally often within the error, {shares}"
        if not gap.clear
        else f"the product finds the next token more often than the cosine, {shares}: norms carry information"
        if gap.value > 0
        else f"the product finds the next token less often than the cosine, {shares}"
    )
    rows = numbers["rows"].get(MINILM)
    also = (
        f"; of {rows['queries']} rows of MiniLM's table {percent(rows['itself']['product_right'])} find themselves by "
        f"the product, and for {percent(rows['others']['product_is_cosine'])} product and cosine find the "
        "same other row first"
        if rows
        else ""
    )
    return f"{finding}. It is a search by product: {verdict}{also}."


QUESTION = Question(
    name="nearest",
    asks="Is the logit h . e_i the highest for the row that h is most similar to, as in a nearest-neighbour search?",
    thread="Why is the lm_head layer in GPT2LMHeadModel not a parameter?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
