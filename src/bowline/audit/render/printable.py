"""Names come from files that strangers wrote; a terminal must not obey them."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """`text` with every character that is not printable written out, line ends aside.

    Example:
        >>> print(printable("lm_head\\x1b[31m.weight"))
        lm_head\\x1b[31m.weight
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
