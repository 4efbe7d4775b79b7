"""The rows that a page lists: their ids, token texts and classes, and links to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bowline.page.elements import Html, element, fragment
from bowline.wording import printable

__all__ = ["LONGEST_TEXT", "MOST_LISTED", "RowClass", "RowList", "listed_rows", "texts_of", "token_text"]

Ids = npt.NDArray[np.int64]

MOST_LISTED = 300_000
"""Rows that a page lists; of a larger vocabulary, some."""
LONGEST_TEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowClass:
    """Rows that have something in common: a short label, what it means, and their ids."""

    label: str
    meaning: str
    ids: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowList:
    """The listed rows of a vocabulary.

    ids: the id of each, ascending. total: the number of rows of the whole vocabulary.
    texts: the token of each, as the page shows it; empty for a row without a token.
    classes: the classes of the whole vocabulary's rows.
    places: the place of each in the list of the page, if that lists the rows of two vocabularies.
    """

    ids: Ids
    total: int
    texts: Sequence[str]
    classes: Sequence[RowClass] = field(default=())
    places: Ids | None = None

    def positions(self, rows: npt.ArrayLike) -> Ids:
        """The places of these ids in the list; -1 for rows that are not listed."""
        wanted = np.asarray(rows, np.int64)
        at = np.searchsorted(self.ids, wanted)
        at[at == self.ids.size] = 0
        return np.where(self.ids[at] == wanted, at, -1) if self.ids.size else np.full(wanted.shape, -1, np.int64)

    def text(self, row: int) -> str:
        """The token of a row; empty if it has none or is not listed."""
        at = int(self.positions([row])[0])
        return self.texts[at] if at >= 0 else ""

    def link(self, row: int) -> Html:
        """The id and the token of a row, which lead to its entry in the search."""
        at = int(self.positions([row])[0])
        text = self.texts[at] if at >= 0 else ""
        words = fragment(f"{row}", element("bdi", f" {text}", class_="token") if text else None)
        place = int(self.places[at]) if self.places is not None else at
        return element("a", words, href=f"#row={place}", class_="row") if at >= 0 else words

    def links(self, rows: Iterable[int], most: int) -> Html:
        """The first rows as links, and the number of the others."""
        every = [int(row) for row in rows]
        shown = [fragment(", " if at else None, self.link(row)) for at, row in enumerate(every[:most])]
        rest = f" and {len(every) - most:,} more" if len(every) > most else None
        return fragment(shown, rest)


def listed_rows(total: int, first: npt.ArrayLike, most: int | None = None) -> Ids:
    """The ids that a page lists: all, or of a large vocabulary those of `first` and others spread evenly."""
    most = MOST_LISTED if most is None else min(most, MOST_LISTED)
    if total <= most:
        return np.arange(total)
    chosen = np.unique(np.asarray(first, np.int64))[: most // 2]
    spread = np.linspace(0, total - 1, most - chosen.size).astype(np.int64)
    return np.union1d(chosen, spread)


def texts_of(ids: Mapping[str, int], listed: Ids, total: int) -> list[str]:
    """The token of each listed row, shortened and on one line."""
    by_id = [""] * total
    for token, number in ids.items():
        if 0 <= number < total:
            by_id[number] = token
    return [token_text(by_id[row]) for row in listed.tolist()]


def token_text(token: str) -> str:
    """A token on one line: control characters and changes of direction escaped, and cut if it is long.

    Example:
        >>> token_text("a" + chr(10) + "b"), len(token_text("x" * 1000))
        ('a\\\\nb', 65)
    """
    text = printable(token[:LONGEST_TEXT])
    return text if len(token) <= LONGEST_TEXT else f"{text}…"
