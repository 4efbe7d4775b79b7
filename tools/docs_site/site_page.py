"""The record of a page that the site has beside those of `docs/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "SitePage", "cell", "table"]

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePage:
    """A page or file at `uri`, with `/` between folders. `origin` is the file that it shows, if any."""

    uri: str
    content: str
    origin: Path | None = None


def cell(text: str) -> str:
    """The text as a cell of a Markdown table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; the cells are Markdown."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
