"""Draws the first loss of each recipe over vocabulary and width: predictions as lines, measurements as points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bowline.errors import UsageError
from bowline.plots.figure_style import GREY, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Point", "draw", "groups"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F3C8D")
"""Okabe and Ito's colours, and two more; markers and dashes differ as well."""
MARKERS = "osD^vP*X"
ALIKE = 0.02
"""Recipes whose predictions differ by no more than this at every size share one line."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The first loss of one model. `label` names its recipe and tie."""

    label: str
    vocab_size: int
    hidden_size: int
    uniform: float
    predicted: float
    measured: float | None = None
    error: float | None = None


def groups(points: Iterable[Point]) -> list[tuple[str, ...]]:
    """Groups of labels with the same predictions at all their sizes, in the order of their largest loss.

    Example:
        >>> one = Point(label="a", vocab_size=9, hidden_size=4, uniform=2.0, predicted=2.5)
        >>> groups([one, Point(label="b", vocab_size=9, hidden_size=4, uniform=2.0, predicted=2.51)])
        [('a', 'b')]
    """
    curves: dict[str, dict[tuple[int, int], float]] = {}
    for point in points:
        curves.setdefault(point.label, {})[point.vocab_size, point.hidden_size] = point.predicted
    found: list[list[str]] = []
    for label, curve in curves.items():
        for others in found:
            other = curves[others[0]]
            if other.keys() == curve.keys() and all(abs(curve[at] / other[at] - 1) < ALIKE for at in curve):
                others.append(label)
                break
        else:
            found.append([label])
    return [tuple(some) for some in sorted(found, key=lambda some: -max(curves[some[0]].values()))]


def draw(family: str, by_vocabulary: Sequence[Point], by_width: Sequence[Point], measured: Sequence[Point]) -> Figure:
    """Draw two panels with one loss axis: over V at one width, and over d at one vocabulary. Dashes are ln V.

    Raises:
        UsageError: nothing to draw, or matplotlib is not installed.
    """
    if not by_vocabulary or not by_width:
        raise UsageError("nothing to draw: expected predictions over the vocabulary and over the width")
    with plain_style():
        from matplotlib import figure as figures
        from matplotlib import ticker

        figure = figures.Figure(figsize=(11.5, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        together = groups([*by_vocabulary, *by_width])
        width, vocabulary = by_vocabulary[0].hidden_size, by_width[0].vocab_size
        _panel(left, "vocab_size", by_vocabulary, [p for p in measured if p.hidden_size == width], together)
        _panel(right, "hidden_size", by_width, [p for p in measured if p.vocab_size == vocabulary], together)
        left.set_title(f"{family}, width {width}: over the vocabulary")
        right.set_title(f"{family}, {vocabulary} tokens: over the width")
        left.set_xlabel("vocabulary V")
        right.set_xlabel("width d")
        left.set_ylabel("loss before the first step, nats")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title="lines predicted, points measured")
    return figure


def _panel(
    axes: Axes, size: str, lines: Sequence[Point], measured: Sequence[Point], together: list[tuple[str, ...]]
) -> None:
    for number, labels in enumerate(together):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        line = sorted((point for point in lines if point.label == labels[0]), key=lambda p: getattr(p, size))
        sizes = [getattr(point, size) for point in line]
        axes.plot(sizes, [point.predicted for point in line], color=colour, label="\n".join(labels))
        found = [point for point in measured if point.label in labels and point.measured is not None]
        axes.errorbar(
            [getattr(point, size) for point in found],
            [point.measured or 0.0 for point in found],
            yerr=[3 * (point.error or 0.0) for point in found],
            fmt=marker,
            color=colour,
            markersize=5,
            markerfacecolor="white",
            capsize=2,
        )
    reference = sorted({(getattr(point, size), point.uniform) for point in lines})
    axes.plot(*zip(*reference, strict=True), color=GREY, linestyle="--", label="ln V: knows nothing, and says so")
