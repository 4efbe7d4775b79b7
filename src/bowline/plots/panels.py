"""Draws a sheet of panels, with curves over steps or bars, from plain records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bowline.errors import UsageError
from bowline.plots.figure_style import GREY, INK, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Bars", "Curve", "Curves", "Group", "Sheet", "draw_sheet"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#b8b8b8")
"""Okabe and Ito's colours, which colour-blind people can distinguish; dashes, markers and hatches differ too."""
DASHES: tuple[Any, ...] = ("-", "--", (0, (1, 1.2)), "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (2, 2)), "-")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "")
MARKERS = "osD^vPX*"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve `y` over `x`, with a band of `error`. The number `colour` marks the same thing in every panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A panel of curves; `references` are horizontal lines, (value, label)."""

    title: str
    subtitle: str = ""
    x_label: str = "step"
    y_label: str
    curves: Sequence[Curve]
    references: Sequence[tuple[float, str]] = ()
    log_x: bool = False
    log_y: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a group: `label` is its text in the legend, `error` the whisker, `note` the text at its end."""

    label: str
    value: float
    error: float | None = None
    note: str = ""
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """A named group of bars."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel of horizontal bars, in groups from the top; `references` are vertical lines, (value, label).

    With `points`, or on a log scale, where bars have no natural start, each value is drawn as a point.
    """

    title: str
    subtitle: str = ""
    x_label: str
    groups: Sequence[Group]
    references: Sequence[tuple[float, str]] = ()
    log: bool = False
    points: bool = False
    low: float | None = None
    high: float | None = None
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Panels side by side under a title."""

    title: str
    panels: Sequence[Curves | Bars]
    subtitle: str = ""
    widths: Sequence[float] = field(default=())


def draw_sheet(sheet: Sheet) -> Figure:
    """Draw a sheet as a matplotlib figure.

    Raises:
        UsageError: the sheet has no panel, or matplotlib is not installed.
    """
    if not sheet.panels:
        raise UsageError("nothing to draw: expected at least one panel")
    with plain_style():
        from matplotlib.figure import Figure

        count = len(sheet.panels)
        figure = Figure(figsize=(1.2 + 5.1 * count, 4.9), layout="constrained")
        figure.get_layout_engine().set(rect=(0.0, 0.0, 1.0, 0.87), w_pad=0.12)  # type: ignore[union-attr,call-arg]
        ratios = list(sheet.widths) or [1.0] * count
        places = figure.subplots(1, count, width_ratios=ratios, squeeze=False)[0]
        for panel, axes in zip(sheet.panels, places, strict=True):
            axes.set_title(panel.title, fontweight="bold", pad=20)
            axes.text(0, 1.03, panel.subtitle, transform=axes.transAxes, fontsize=8.5, color=GREY)
            if isinstance(panel, Curves):
                _draw_curves(axes, panel)
            else:
                _draw_bars(axes, panel)
        figure.text(0.012, 0.945, sheet.title, fontsize=13, fontweight="bold")
        figure.text(0.012, 0.9, sheet.subtitle, fontsize=9.5, color=GREY)
    return figure


# --- curves ---------------------------------------------------------------------------------------------------------


def _draw_curves(axes: Axes, panel: Curves) -> None:
    for curve in panel.curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        y = [value if math.isfinite(value) else math.nan for value in curve.y]
        style: dict[str, Any] = {"linestyle": DASHES[curve.colour % len(DASHES)]}
        style["linewidth"] = 2.8 if curve.colour == 0 else 1.6  # curves on top of the first stay visible
        axes.plot(curve.x, y, color=colour, label=curve.label, **style)
        if curve.error is not None:
            low = [value - error for value, error in zip(y, curve.error, strict=True)]
            high = [value + error for value, error in zip(y, curve.error, strict=True)]
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.18, linewidth=0)
    for value, label in panel.references:
        axes.axhline(value, color=INK, linestyle=":", linewidth=1.3, label=label)
    if panel.log_x:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=-0.1)
    if panel.log_y:
        axes.set_yscale("log")
    if panel.low is not None or panel.high is not None:
        axes.set_ylim(panel.low, panel.high)
    _plain_numbers(axes)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, handlelength=2.6, columnspacing=1.2)


# --- bars -----------------------------------------------------------------------------------------------------------


def _draw_bars(axes: Axes, panel: Bars) -> None:
    seen: set[str] = set()
    places, names = [], []
    at = 0.0
    for group in panel.groups:
        start = at
        left = 0.0
        for bar in group.bars:
            _draw_bar(axes, bar, at, left, panel, "" if bar.label in seen else bar.label)
            seen.add(bar.label)
            if panel.stacked:
                left += bar.value
            else:
                at += 1.0
        at += 1.0 if panel.stacked else 0.0
        places.append((start + at - 1) / 2)
        names.append(group.name)
        at += 0.7
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.7, -1.0)  # from the top
    axes.grid(axis="y", visible=False)
    for value, label in panel.references:
        axes.axvline(value, color=INK, linestyle=":", linewidth=1.3, label=label)
    if panel.log:
        axes.set_xscale("log")
    axes.margins(x=0.16)
    if panel.low is not None or panel.high is not None:
        axes.set_xlim(panel.low, panel.high)
    _plain_numbers(axes)
    axes.set_xlabel(panel.x_label)
    if len(seen) > 1 or panel.references:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, handlelength=2.0, columnspacing=1.2)


def _draw_bar(axes: Axes, bar: Bar, at: float, left: float, panel: Bars, label: str) -> None:
    colour = COLOURS[bar.colour % len(COLOURS)]
    value = bar.value if math.isfinite(bar.value) else 0.0
    error = bar.error if bar.error is not None and math.isfinite(bar.error) else 0.0
    if panel.log or panel.points:
        marker: dict[str, Any] = {"marker": MARKERS[bar.colour % 8], "markersize": 7, "linestyle": ""}
        axes.plot([value], [at], color=colour, label=label or None, **marker)
        if error:
            axes.errorbar([value], [at], xerr=[error], color=colour, capsize=3, linewidth=1.4)
    else:
        options: dict[str, Any] = {"color": colour, "edgecolor": "white", "hatch": HATCHES[bar.colour % 8]}
        axes.barh([at], [value], left=left, height=0.86, label=label or None, linewidth=0.6, **options)
        if error:
            axes.errorbar([left + value], [at], xerr=[error], color=INK, capsize=2.5, linewidth=1.1)
    if bar.note:
        end = left + value + (error if value >= 0 else 0.0)
        axes.annotate(
            bar.note, (end, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )


def _plain_numbers(axes: Axes) -> None:
    from matplotlib import ticker

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        if axis.get_scale() != "linear":
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(ticker.NullFormatter())
