"""Strings from untrusted files as parts of Markdown: whatever they hold, they stay text."""

from __future__ import annotations

import re

from bowline.wording import printable

__all__ = ["code_span", "shortened"]

LONGEST = 200
"""Characters of one name that are shown."""


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
