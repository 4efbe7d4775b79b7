"""Escapes control characters, because names from untrusted files must not control a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(line: str) -> str:
    """`line` with every character escaped that would end the line or move the cursor.

    Example:
        >>> print(printable("lm_head" + chr(27) + "[31m.weight"))
        lm_head\\x1b[31m.weight
    """
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
