"""Text for messages and reports: lists of words, the place a message is about, and escaped control characters."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath

__all__ = ["byte_count", "joined", "listed", "located", "printable", "shell_word"]


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


def located(message: str, place: str) -> str:
    """The message with `place` in front, unless it begins with it.

    Example:
        >>> located("model.safetensors: 0 bytes", "models/a")
        'models/a: model.safetensors: 0 bytes'
        >>> located("model.safetensors: 0 bytes", "models/a/model.safetensors")
        'models/a/model.safetensors: 0 bytes'
        >>> located("org/name@main: not found", "org/name")
        'org/name@main: not found'
    """
    path = PurePath(place)
    for said in (place, str(path), str(path.parent)):  # a file's message may name its directory
        if message.startswith((f"{said}:", f"{said}@", f"'{said}'")):
            return message
    if path.name and place.endswith(path.name) and message.startswith(f"{path.name}: "):
        return place.removesuffix(path.name) + message
    return f"{place}: {message}"


def printable(line: str) -> str:
    """`line` with every character escaped that would end the line or move the cursor.

    Names in untrusted files must not control a terminal.

    Example:
        >>> print(printable("lm_head" + chr(27) + "[31m.weight"))
        lm_head\\x1b[31m.weight
    """
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def byte_count(count: int) -> str:
    """A size in bytes, kB, MB or GB, with three digits.

    Example:
        >>> byte_count(768), byte_count(28_311_552)
        ('768 bytes', '28.3 MB')
    """
    size: float = count
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def shell_word(path: str) -> str:
    """A path as a shell and a command take it: quoted, and not an option.

    Example:
        >>> shell_word("a b"), shell_word("-x"), shell_word("models/a")
        ("'a b'", './-x', 'models/a')
    """
    return shlex.quote(f"./{path}" if path.startswith("-") else path)
