"""The anchors of headings, as GitHub makes them, so that one link works there and in the site."""

from __future__ import annotations

import re

__all__ = ["github_anchor"]


def github_anchor(heading: str, separator: str = "-") -> str:
    """The anchor of a heading: in lower case, without punctuation, `separator` for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
