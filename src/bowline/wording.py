"""Lists of words as text for messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["joined", "listed"]


def joined(words: Sequence[str]) -> str:
    """All the words, separated by commas, with "and" before the last.

    Example:
        >>> joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def listed(words: Sequence[str], limit: int, rest: str = "more") -> str:
    """The first `limit` words, separated by commas, and the number of the others.

    Example:
        >>> listed(["a", "b"], limit=2), listed(["a", "b", "c"], limit=2)
        ('a, b', 'a, b and 1 more')
        >>> listed(["0-3", "17", "99-120"], limit=1, rest="more runs")
        '0-3 and 2 more runs'
    """
    others = f" and {len(words) - limit} {rest}" if len(words) > limit else ""
    return ", ".join(words[:limit]) + others
