"""Writes a text file whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from bowline.errors import UsageError

__all__ = ["write_whole"]

LONGEST_PART = 48
"""Characters of a file's name in the name of the staged file, which may not be longer than names can be."""


def write_whole(path: Path, content: str) -> None:
    """Replace a file atomically: after an interruption it is either the old file or the new one.

    Raises:
        UsageError: the file cannot be written.
    """
    staged = path.with_name(f".{path.name[:LONGEST_PART]}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except BaseException as error:  # also an interrupt
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UsageError(
            f"{path}: cannot be written: {error.strerror or error}", help="give a writable directory"
        ) from error
