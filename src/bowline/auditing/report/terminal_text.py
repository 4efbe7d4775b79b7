"""Names come from files that strangers wrote; a terminal must not obey them."""

from __future__ import annotations

__all__ = ["printable"]


def printable(line: str) -> str:
    """One line, with every character that would break it or move the cursor written out.

    Example:
        >>> print(printable("lm_head" + chr(27) + "[31m.weight"))
        lm_head\\x1b[31m.weight
    """
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
