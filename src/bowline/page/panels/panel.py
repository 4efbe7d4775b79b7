"""A plot with its title, what it shows in a sentence, and its numbers in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bowline.page.elements import Child, Html, element

__all__ = ["data_table", "panel"]


def panel(title: str, drawing: Child, note: Child, table: Child, *, wide: bool = False) -> Html:
    """A plot as a figure. The table is behind a summary that the keyboard opens."""
    numbers = element("details", element("summary", "As a table"), table) if table else None
    return element(
        "figure",
        element("h3", title),
        drawing,
        element("figcaption", note),
        numbers,
        class_="panel wide" if wide else "panel",
    )


def data_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Child]], *, words: int = 1) -> Html:
    """A table that scrolls by itself where it is wider than the page. The first `words` columns are left-aligned."""
    head = [
        element("th", heading, scope="col", class_=None if at < words else "n") for at, heading in enumerate(headings)
    ]
    body = [
        element("tr", [element("td", cell, class_=None if at < words else "n") for at, cell in enumerate(row)])
        for row in rows
    ]
    table = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
