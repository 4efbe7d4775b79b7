"""The frame of a plot: scales, ticks and labels in SVG, coloured by the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bowline.page.elements import Child, Html, element, number

__all__ = [
    "BOTTOM",
    "HEIGHT",
    "LEFT",
    "RIGHT",
    "TOP",
    "WIDTH",
    "AxisScale",
    "count_label",
    "frame",
    "linear",
    "logarithmic",
    "path",
    "plain",
]

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
"""Size and margins of a plot in its own units: about one pixel each on a phone and on a desktop."""


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to the places of one axis."""

    low: float
    high: float
    to_unit: Callable[[float], float]
    """Into 0 to 1."""
    ticks: tuple[float, ...]

    def x(self, value: float) -> float:
        """The place on the horizontal axis."""
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, self.to_unit(value)))

    def y(self, value: float) -> float:
        """The place on the vertical axis."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, self.to_unit(value)))


def linear(low: float, high: float) -> AxisScale:
    """A scale from `low` to `high`, with about four ticks at round numbers.

    Example:
        >>> linear(0, 30522).ticks
        (0, 10000, 20000, 30000)
    """
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(factor for factor in (5, 2, 1) if (high - low) / (step * factor) >= 2.5 or factor == 1)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    ticks = tuple(float(f"{place * step:.12g}") for place in range(first, last + 1))
    return AxisScale(low, high, lambda value: (value - low) / (high - low), tuple(_whole(tick) for tick in ticks))


def logarithmic(low: float, high: float) -> AxisScale:
    """A scale of powers of ten that holds `low` and `high`, both above 0.

    Example:
        >>> logarithmic(0.02, 30).ticks
        (0.01, 0.1, 1.0, 10.0, 100.0)
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = max(1, (last - first) // 4)
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return AxisScale(
        10.0**first, 10.0**last, lambda value: (math.log10(max(value, 1e-300)) - first) / (last - first), ticks
    )


def plain(value: float) -> str:
    """A number as a tick has it.

    Example:
        >>> plain(0.5), plain(30000), plain(1e-06), plain(1.25e9), plain(100.0)
        ('0.5', '30,000', '1e-6', '1.25e9', '100')
    """
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{round(value):,}" if float(value).is_integer() else f"{value:.4g}"


def count_label(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count_label(1, "row"), count_label(30522, "row")
        ('1 row', '30,522 rows')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def frame(
    *content: Child,
    label: str,
    x: AxisScale | None = None,
    y: AxisScale | None = None,
    x_label: str = "",
    y_label: str = "",
    height: int = HEIGHT,
) -> Html:
    """The SVG of a plot: grid and ticks of its scales under `content`. `label` says in a sentence what it shows."""
    parts: list[Child] = []
    for tick in x.ticks if x else ():
        at = x.x(tick) if x else 0
        anchor = "end" if at > WIDTH - RIGHT - 12 else "middle"
        parts.append(element("line", x1=at, x2=at, y1=TOP, y2=height - BOTTOM, class_="grid"))
        parts.append(element("text", plain(tick), x=at, y=height - BOTTOM + 15, class_="tick", text_anchor=anchor))
    for tick in y.ticks if y else ():
        at = y.y(tick) if y else 0
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(element("text", plain(tick), x=LEFT - 6, y=at + 4, class_="tick", text_anchor="end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    if x_label:
        parts.append(element("text", x_label, x=middle, y=height - 6, class_="axis", text_anchor="middle"))
    if y_label:
        upright = f"translate(11 {number((TOP + height - BOTTOM) / 2)}) rotate(-90)"
        parts.append(element("text", y_label, transform=upright, class_="axis", text_anchor="middle"))
    return element("svg", parts, content, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)


def path(points: Sequence[tuple[float, float]], *, closed: bool = False) -> Html:
    """A line through these places, as the `d` of a path."""
    line = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return Html(f"M{line}{'Z' if closed else ''}" if points else "")


def _whole(tick: float) -> float:
    return int(tick) if float(tick).is_integer() else tick
