"""Writes the table of recipes into `docs/recipes.md`, between its two marks: `python -m tools.recipes_page`."""

from __future__ import annotations

from pathlib import Path

from bowline.recipes.markdown_table import table

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- recipes: generated -->\n", "<!-- end -->"


def updated(page: str) -> str:
    """The page with its table generated from the data."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
