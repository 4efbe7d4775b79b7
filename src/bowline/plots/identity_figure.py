"""Draws how far a table is from E E^T = I, and computes the distance.

E E^T = a I requires three things of the rows of E (V, D): E^T E treats every direction alike (with V > D that is a
tight frame, the closest possible), any two rows are orthogonal, and all rows have one length. Each has a panel, which
also shows a table of independent Gaussian entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry import (
    Rows,
    Table,
    gaussian_cosine_density,
    gaussian_eigenvalues,
    gaussian_norm_density,
    gaussian_participation_ratio,
    identity_bound,
    identity_distance,
    mean_cosine,
    mean_squared_cosine,
    sample_rows,
    tight_frame_distance,
    welch_bound,
)
from bowline.geometry.torch_tensors import check_holds_values, is_tensor
from bowline.plots.figure_style import GREY, INK, MEASURED, REFERENCE, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["IdentityAnswer", "identity_answer", "identity_figure"]

Floats = npt.NDArray[np.float64]

WHOLE_ENTRIES = 40_000_000
"""Above this number of entries, the figure uses a sample of the rows."""
PAIRED_ROWS = 1500
"""The most rows whose pairwise cosines are shown: a million pairs."""
BINS = 120
LONGEST_NAME = 60
"""The most characters of a name in the legend."""
DECADES = 4
"""Decades below their mean in which eigenvalues are shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IdentityAnswer:
    """The distance of E E^T from a multiple of I, and the data of the figure.

    The distances are those of `bowline.geometry`, for the whole table even if only `sampled_rows` of it were used.
    `rows` is V without the rows that have a NaN or an infinity, and `gaussian_...` are the values of a Gaussian table
    of V rows. `eigenvalues` are those of E^T E that can differ from 0, in units of their mean, descending; `cosines`
    those of all pairs among at most 1500 rows; `norms` in units of their root mean square. These three are computed
    from the `seen_rows`, the used rows without a NaN or an infinity.
    """

    rows: int
    hidden_size: int
    sampled_rows: int | None
    seen_rows: int
    identity_distance: float
    identity_bound: float
    gaussian_identity_distance: float
    tight_frame_distance: float
    gaussian_tight_frame_distance: float
    mean_cosine: float
    mean_squared_cosine: float
    welch_bound: float
    eigenvalues: Floats
    cosines: Floats
    norms: Floats

    def sentence(self) -> str:
        """The answer as a sentence, with its numbers.

        Example:
            >>> identity_answer(np.vstack([np.eye(3), -np.eye(3)])).sentence()
            'no: its rank is at most 3 of 6; distance 0.7071 from a multiple of I, at least 0.7071 for this shape'
        """
        shape = f"its rank is at most {self.hidden_size} of {self.rows}"
        distance = f"distance {self.identity_distance:.4f} from a multiple of I"
        bound = f"at least {self.identity_bound:.4f} for this shape"
        return f"no: {shape}; {distance}, {bound}" if self.rows > self.hidden_size else f"{distance}, 0 would be equal"


def identity_answer(table: Table | Rows, *, rows: int | None = None, seed: int = 0) -> IdentityAnswer:
    """Compute the numbers of `identity_figure`, without drawing.

    `table` (V, D) is the whole table, or a uniform sample of a table of `rows` rows. `seed` draws the rows whose
    cosines are shown and, if the table has more than 40 million entries, a sample of its rows.

    Raises:
        UsageError: not a table, or a table with fewer than two nonzero usable rows.
    """
    held = _held(table, rows, seed)
    if held.nonzero.size < 2 or held.hidden_size < 1:
        raise UsageError(
            f"table: expected at least two rows that are finite and not zero, got {held.nonzero.size} of {held.stored}",
            help="pass a table that was initialised",
        )
    eigenvalues = held.eigenvalues()[::-1]
    gaussian = gaussian_participation_ratio(held.total, held.hidden_size)
    return IdentityAnswer(
        rows=held.total,
        hidden_size=held.hidden_size,
        sampled_rows=held.stored if held.stored < held.stored_total else None,
        seen_rows=held.count,
        identity_distance=_defined(identity_distance(held)),
        identity_bound=_defined(identity_bound(held.total, held.hidden_size)),
        gaussian_identity_distance=math.sqrt(1 - gaussian / held.total),
        tight_frame_distance=_defined(tight_frame_distance(held)),
        gaussian_tight_frame_distance=math.sqrt(max(0.0, held.hidden_size / gaussian - 1)),
        mean_cosine=_defined(mean_cosine(held)),
        mean_squared_cosine=_defined(mean_squared_cosine(held)),
        welch_bound=_defined(welch_bound(held.in_table(held.nonzero.size), held.hidden_size)),
        eigenvalues=eigenvalues / eigenvalues.mean(),
        cosines=_cosines(held, seed),
        norms=held.norms / math.sqrt(float(held.squared_norms.mean())),
    )


def identity_figure(
    table: Table | Rows | IdentityAnswer, *, name: str = "this table", rows: int | None = None, seed: int = 0
) -> Figure:
    """Draw how far a table is from E E^T = I: a figure of three panels, with the distance and its bound in the title.

    The panels show the eigenvalues of E^T E, the cosines of pairs of rows and the lengths of the rows, each with the
    values of a Gaussian table of this shape and of the identity. `rows` and `seed` as in `identity_answer`;
    `name` is the table's name in the legend. `bowline.plots.figure_style.save` writes the figure to a file.

    Raises:
        UsageError: as `identity_answer`, or matplotlib is not installed.
    """
    with plain_style():
        from matplotlib.figure import Figure

        answer = table if isinstance(table, IdentityAnswer) else identity_answer(table, rows=rows, seed=seed)
        figure = Figure(figsize=(11.5, 4.4))
        spectrum, cosines, norms = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.72, bottom=0.22, wspace=0.24)
        _draw_spectrum(spectrum, answer)
        _draw_cosines(cosines, answer)
        _draw_norms(norms, answer)
        _write_title(figure, answer)
        _write_legend(figure, name)
    return figure


def _held(table: Table | Rows, rows: int | None, seed: int) -> Rows:
    if isinstance(table, Rows):
        return table
    values: Any = table
    if is_tensor(values):
        check_holds_values(values)
    shape = tuple(getattr(values, "shape", ()))
    if len(shape) == 2:
        chosen = sample_rows(*shape, budget_bytes=4 * WHOLE_ENTRIES, seed=seed)
        if chosen is not None:
            return Rows(values[chosen], total=shape[0] if rows is None else rows)
    return Rows(values, total=rows)


def _defined(figure: float | None) -> float:
    assert figure is not None, "two rows that are not zero define every figure"
    return figure


def _cosines(rows: Rows, seed: int) -> Floats:
    chosen = rows.nonzero
    if chosen.size > PAIRED_ROWS:
        chosen = np.random.default_rng(seed).choice(chosen, size=PAIRED_ROWS, replace=False, shuffle=False)
    unit = rows.array[chosen] / rows.norms[chosen, None]
    cosines: Floats = np.clip((unit @ unit.T)[np.triu_indices(chosen.size, 1)], -1.0, 1.0)
    return cosines


# --- panels ---------------------------------------------------------------------------------------------------------


def _draw_spectrum(axes: Axes, answer: IdentityAnswer) -> None:
    shown = np.where(answer.eigenvalues > 10.0**-DECADES, answer.eigenvalues, np.nan)
    order = np.arange(1, shown.size + 1)
    gaussian = gaussian_eigenvalues(answer.seen_rows, answer.hidden_size)
    axes.axhline(1.0, color=INK, linestyle=":", linewidth=1.4)
    axes.plot(order, gaussian, color=REFERENCE, linestyle="--")
    axes.plot(order, shown, color=MEASURED)
    axes.set_yscale("log")
    axes.set_ylim(min(0.1, 0.7 * float(np.nanmin(shown))), max(10.0, 1.4 * float(shown[0])))
    axes.set_xlim(0, shown.size + 1)
    axes.set_xlabel("direction, strongest first")
    axes.set_ylabel("eigenvalue of EᵀE / mean")
    tight, gaussian_tight = answer.tight_frame_distance, answer.gaussian_tight_frame_distance
    distances = f"distance from a tight frame {tight:.3g}; Gaussian {gaussian_tight:.3g}"
    _write_panel_title(axes, "Are all directions used alike?", distances if answer.rows >= answer.hidden_size else "")


def _draw_cosines(axes: Axes, answer: IdentityAnswer) -> None:
    spread = 5 / math.sqrt(answer.hidden_size)
    low = max(-1.0, min(-spread, float(answer.cosines.min())))
    high = min(1.0, max(spread, float(answer.cosines.max())))
    places, floor = _draw_histogram(axes, answer.cosines, low, high)
    if answer.hidden_size > 1:
        _draw_reference(axes, places, gaussian_cosine_density(places, answer.hidden_size), floor)
    axes.axvline(0.0, color=INK, linestyle=":", linewidth=1.4)
    axes.set_xlabel("cosine of two rows")
    axes.set_ylabel("density of pairs")
    root, least = math.sqrt(answer.mean_squared_cosine), math.sqrt(answer.welch_bound)
    _write_panel_title(axes, "Off the diagonal: orthogonal rows?", f"root mean square {root:.3f}, at least {least:.3f}")


def _draw_norms(axes: Axes, answer: IdentityAnswer) -> None:
    spread = 5 / math.sqrt(2 * answer.hidden_size)
    low = max(0.0, min(1 - spread, float(answer.norms.min())))
    high = max(1 + spread, float(answer.norms.max()))
    places, floor = _draw_histogram(axes, answer.norms, low, high)
    _draw_reference(axes, places, gaussian_norm_density(places, answer.hidden_size), floor)
    axes.axvline(1.0, color=INK, linestyle=":", linewidth=1.4)
    axes.set_xlabel("length of a row / root mean square")
    axes.set_ylabel("density of rows")
    p5, p95 = np.quantile(answer.norms, (0.05, 0.95))
    _write_panel_title(axes, "On the diagonal: one length?", f"9 of 10 rows between {p5:.2f} and {p95:.2f}")


def _draw_histogram(axes: Axes, values: Floats, low: float, high: float) -> tuple[Floats, float]:
    """Draw a histogram on a log scale from half a value per bin; returns places for a curve, and that floor."""
    edges = np.linspace(low, high, min(BINS, 8 + math.isqrt(values.size)) + 1)
    density, _ = np.histogram(values, edges, density=True)
    floor = 0.5 / (values.size * float(edges[1] - edges[0]))
    axes.set_yscale("log")
    axes.stairs(density, edges, baseline=floor, fill=True, color=MEASURED, alpha=0.3)
    axes.stairs(density, edges, baseline=floor, color=MEASURED, linewidth=1.2)
    return np.linspace(low, high, 4 * BINS)[1:-1], floor


def _draw_reference(axes: Axes, places: Floats, density: Floats, floor: float) -> None:
    axes.plot(places, np.where(density > floor, density, np.nan), color=REFERENCE, linestyle="--")
    axes.set_ylim(bottom=floor)


# --- words ----------------------------------------------------------------------------------------------------------


def _write_panel_title(axes: Axes, question: str, subtitle: str) -> None:
    axes.set_title(question, fontweight="bold", pad=20)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=8.5, color=GREY)


def _write_title(figure: Figure, answer: IdentityAnswer) -> None:
    distance = f"distance {answer.identity_distance:.4f} from the nearest multiple of I"
    verdict = f"It has {distance}"
    if answer.rows > answer.hidden_size:
        verdict = f"No, its rank is at most {answer.hidden_size} of {answer.rows}: {distance}"
    rest = (
        f"min ‖a E Eᵀ - I‖ / √V is 0 when they are equal; for {answer.rows} rows of {answer.hidden_size} it is "
        f"at least {answer.identity_bound:.4f}, and {answer.gaussian_identity_distance:.4f} for a Gaussian table"
    )
    if answer.sampled_rows:
        rest += f"; estimated from {answer.sampled_rows} rows"
    figure.text(0.012, 0.925, f"Is E Eᵀ = I?  {verdict}", fontsize=13, fontweight="bold")
    figure.text(0.012, 0.865, rest, fontsize=9.5, color=GREY)


def _write_legend(figure: Figure, name: str) -> None:
    from matplotlib.lines import Line2D

    short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    handles = [
        Line2D([], [], color=MEASURED, label=short.replace("$", r"\$")),
        Line2D([], [], color=REFERENCE, linestyle="--", label="independent Gaussian entries, same shape"),
        Line2D([], [], color=INK, linestyle=":", label="where the identity would be"),
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.006, 0.0), ncols=3, handlelength=2.4)
