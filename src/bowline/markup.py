"""Strings from untrusted files as parts of Markdown and HTML: whatever they hold, they stay text."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from enum import StrEnum

from bowline.wording import printable

__all__ = ["Tone", "code_span", "html_report", "shortened"]

LONGEST = 200
"""Characters of one name that are shown."""
LEFT = 'style="text-align:left"'
WITHOUT_FORMULAS = "tex2jax_ignore mathjax_ignore"
"""Classes that keep a notebook from reading $ in a name as the beginning of a formula."""


def shortened(text: str) -> str:
    """`text` on one line, with control characters and changes of direction escaped, and cut if it is long.

    Example:
        >>> shortened("a" + chr(10) + "b" + chr(0x202E))
        'a\\\\nb\\\\u202e'
    """
    line = printable(text[: LONGEST + 1])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def code_span(text: str) -> str:
    """`text` as inline code in Markdown, which neither Markdown nor HTML inside it can end.

    Example:
        >>> print(code_span("lm_head.weight"), code_span("a`b"), code_span("</code>"))
        `lm_head.weight` ``a`b`` `</code>`
    """
    line = shortened(text) or "(empty)"
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") or (line[0] == line[-1] == " " and line.strip()) else ""
    return f"{fence}{pad}{line}{pad}{fence}"


class Tone(StrEnum):
    """How a row of an HTML table is coloured. Each colour has a contrast of at least 4 to white and to #111111."""

    GOOD = "#288a40"
    BAD = "#dd3c3c"
    DOUBTFUL = "#9a7200"
    NEUTRAL = "#777777"


def html_report(
    title: str,
    verdict: str,
    tone: Tone,
    headings: Sequence[str],
    rows: Sequence[tuple[Tone, str, Sequence[str | tuple[str, ...]]]],
) -> str:
    """A verdict and a table, as HTML for a notebook: no script, no address, and every string escaped.

    A row is its tone, its first cell, which is coloured, and the other cells; a tuple is a cell of several lines. All
    other colours are the notebook's own. Without rows there is no table.

    Example:
        >>> text = html_report("model", "1 < 2", Tone.GOOD, ["tie"], [])
        >>> text.partition("<p>")[2]
        '<code>model</code>: <b style="color:#288a40">1 &lt; 2</b></p></div>'
    """
    head = "".join(f"<th {LEFT}>{_text(word)}</th>" for word in headings)
    lines = "".join(f"<tr>{_coloured(first, colour)}{''.join(map(_cell, rest))}</tr>" for colour, first, rest in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>" if rows else ""
    begin = f'<p><code>{_text(title)}</code>: <b style="color:{tone.value}">{_text(verdict)}</b></p>'
    return f'<div class="{WITHOUT_FORMULAS}">{begin}{table}</div>'


def _coloured(text: str, colour: Tone) -> str:
    style = f"text-align:left;color:{colour.value};border-left:3px solid {colour.value}"
    return f'<td style="{style}"><b>{_text(text)}</b></td>'


def _cell(content: str | tuple[str, ...]) -> str:
    lines = (content,) if isinstance(content, str) else content
    return f"<td {LEFT}>{'<br>'.join(map(_text, lines))}</td>"


def _text(text: str) -> str:
    return html.escape(printable(text))
