"""One look for all figures, and files that are the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bowline.errors import UsageError, how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GREY", "INK", "MEASURED", "REFERENCE", "check_can_save", "plain_style", "save"]

MEASURED = "#0072B2"
REFERENCE = "#D55E00"
"""Blue and vermilion of Okabe and Ito's palette, which the colour-blind tell apart; dashes and fills differ as well."""
INK = "#222222"
GREY = "#6b6b6b"

STYLE: dict[str, Any] = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "bowline",
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
}
NAMELESS: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The formats that can be written, and what is left out of each: a date, a version."""


@contextmanager
def plain_style() -> Iterator[None]:
    """Inside, figures are made in this style, whatever the reader's own settings are.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib import style
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UsageError("a plot needs matplotlib, which is not installed", help=how_to_install("plot")) from None
    with style.context(STYLE, after_reset=True):
        yield


def check_can_save(path: str | Path) -> None:
    """Before the work that a figure shows: whether there will be a figure.

    Raises:
        UsageError: an ending that no format has, a directory that is not there, or no matplotlib.
    """
    path = Path(path)
    if path.suffix.lower() not in NAMELESS:
        raise UsageError(
            f"{path}: expected a file name that ends in {', '.join(NAMELESS)}, got {path.suffix or 'no ending'}",
            help=f"use {path.with_suffix('.svg')}",
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{path}: the directory {path.parent} does not exist", help="give a file in an existing directory"
        )
    with plain_style():
        pass


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure as SVG, PNG or PDF, by the ending of `path`; the same figure is the same bytes.

    Raises:
        UsageError: another ending, or a place that cannot be written.
    """
    path = Path(path)
    check_can_save(path)
    metadata = NAMELESS[path.suffix.lower()]
    try:
        with plain_style():
            figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as error:
        raise UsageError(
            f"{path}: the figure cannot be written: {error.strerror or error}",
            help="give a file in a writable directory",
        ) from error
    return path
