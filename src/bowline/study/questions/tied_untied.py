"""The question whether tying helps: tied against untied at equal width, at equal parameters, and on short text."""

from __future__ import annotations

import math
from typing import Any

from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet
from bowline.study.experiments import Experiments
from bowline.study.observed_run import equal_width, runs
from bowline.study.question import Numbers, Question
from bowline.study.small_models import mean_curve
from bowline.study.statistics import difference, mean, standard_error, with_error, written

EXPECTED = {
    "width": ("MobileLLM (2024)", "worse"),
    "parameters": ("Press and Wolf (2016)", "better"),
    "short": ("Press and Wolf (2016)", "better"),
}
"""The published result for each comparison, and its source."""
ARMS = {"tied": "tied", "untied": "untied, equal width", "narrow": "untied, equal parameters"}


def _run(experiments: Experiments) -> Numbers:
    narrow = equal_width(experiments.setting)
    plenty = {
        "tied": runs(experiments, tied=True),
        "untied": runs(experiments, tied=False),
        "narrow": runs(experiments, tied=False, width=narrow),
    }
    short = {name: runs(experiments, tied=name == "tied", few=True) for name in ("tied", "untied")}
    looks = plenty["tied"][0]["looks"]
    return {
        "steps": [look["step"] for look in looks],
        "tokens": experiments.setting.tokens,
        "few_tokens": experiments.setting.few_tokens,
        "plenty": {name: _arm(found) for name, found in plenty.items()},
        "short": {name: _arm(found) for name, found in short.items()},
        "alike": [[look["alike"] for look in run["looks"]] for run in plenty["untied"]],
    }


def _arm(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "parameters": found[0]["parameters"],
        "width": found[0]["width"],
        "held_out": [[look["held_out"] for look in run["looks"]] for run in found],
    }


def _perplexities(arm: dict[str, Any]) -> list[float]:
    return [math.exp(losses[-1]) for losses in arm["held_out"]]


def _least(arm: dict[str, Any]) -> list[float]:
    """Return each seed's best perplexity over its run, which early stopping would keep."""
    return [math.exp(min(losses)) for losses in arm["held_out"]]


def _plot(numbers: Numbers) -> Sheet:
    def curves(arms: dict[str, Any]) -> list[Curve]:
        found = []
        for colour, name in enumerate(ARMS):
            if name in arms:
                y, error = mean_curve(arms[name]["held_out"])
                found.append(Curve(label=ARMS[name], x=numbers["steps"], y=y, error=error, colour=colour))
        return found

    groups = []
    for what, arms in (("plenty of text", numbers["plenty"]), ("short text", numbers["short"])):
        bars = []
        for colour, name in enumerate(ARMS):
            if name in arms:
                found = _least(arms[name])
                note = f"{mean(found):.1f}  ({arms[name]['parameters'] / 1e6:.2f} M)"
                bars.append(
                    Bar(label=ARMS[name], value=mean(found), error=standard_error(found), note=note, colour=colour)
                )
        groups.append(Group(name=what, bars=bars))
    return Sheet(
        title="Is a tied model better than an untied one?",
        subtitle=f"small GPT-2s, {numbers['tokens']} tokens a step, "
        f"{len(numbers['plenty']['tied']['held_out'])} seeds; bands and whiskers are standard errors",
        panels=[
            Curves(
                title="Plenty of text",
                subtitle="no token is seen twice",
                y_label="held-out loss, nats",
                curves=curves(numbers["plenty"]),
            ),
            Curves(
                title="Short text",
                subtitle=f"{numbers['few_tokens']} tokens, again and again",
                y_label="held-out loss, nats",
                curves=curves(numbers["short"]),
            ),
            Bars(
                title="Held-out perplexity",
                subtitle="of the best look of each run; lower is better",
                x_label="perplexity",
                groups=groups,
            ),
        ],
    )


def _verdict(tied: list[float], other: list[float], expected: str) -> str:
    """Word the comparison, lower is better, and name the source that found a different result."""
    found = difference(tied, other)
    way = "neither clearly better nor worse" if not found.clear else "better" if found.value < 0 else "worse"
    comparison = f"{way} ({with_error(tied)} against {with_error(other)}, {len(tied)} seeds)"
    by, theirs = EXPECTED[expected]
    return comparison if way == theirs else f"{comparison}, where {by} found it {theirs},"


def _conclusion(numbers: Numbers) -> str:
    plenty, short = numbers["plenty"], numbers["short"]
    sizes = {name: f"{arm['parameters'] / 1e6:.2f} M" for name, arm in plenty.items()}
    last = {name: _perplexities(arm) for name, arm in plenty.items()}
    first = (
        f"By held-out perplexity after {numbers['steps'][-1]} steps a tied model of {sizes['tied']} parameters is "
        f"{_verdict(last['tied'], last['untied'], 'width')} beside an untied one of the same width, with "
        f"{sizes['untied']}, and {_verdict(last['tied'], last['narrow'], 'parameters')} beside an untied one of "
        f"{sizes['narrow']}"
    )
    best = _verdict(_least(short["tied"]), _least(short["untied"]), "short")
    alike = [seed[-1] for seed in numbers["alike"]]
    return (
        f"{first}. On {numbers['few_tokens']} tokens, seen again and again, the tied model's best is "
        f"{best} beside the untied one's; the untied model's two tables end with pairwise "
        f"cosines that correlate at {written(mean(alike), 2)}, where 1 would be one representation."
    )


QUESTION = Question(
    name="tied-untied",
    asks="Is one matrix better than two: what does it mean to learn only one representation of each word?",
    thread="Why is the lm_head layer in GPT2LMHeadModel not a parameter?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
