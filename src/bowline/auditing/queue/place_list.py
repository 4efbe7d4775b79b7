"""A list of places to audit: a text file with one path a line."""

from __future__ import annotations

from pathlib import Path

from bowline.errors import UsageError

__all__ = ["read_places"]


def read_places(file: Path) -> list[str]:
    """The lines of `file` in order, without empty ones and those that begin with #; spaces around a path do not count.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, or lists nothing.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read: {error.strerror or error}", help="give a text file with one path a line"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: is not text: byte {error.start} is not UTF-8", help="give a text file with one path a line"
        ) from None
    lines = [line.strip() for line in text.split("\n")]
    places = [line for line in lines if line and not line.startswith("#")]
    if not places:
        raise UsageError(f"{file}: lists no path, expected one a line", help="write the paths into it")
    return places
