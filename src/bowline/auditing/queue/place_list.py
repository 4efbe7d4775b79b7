"""A list of places to audit: a text file with one path a line, and the checkpoints that are at a path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bowline.errors import UsageError

__all__ = ["expanded", "read_places"]


def expanded(paths: Iterable[str], *, recursive: bool = False) -> Iterator[str]:
    """Each checkpoint in these paths. A path without one is kept, so that its own error is reported.

    A directory of several GGUF files is several checkpoints. With `recursive` those below a directory are added.
    """
    from bowline.checkpoint import checkpoints_at, find_checkpoints

    for path in paths:
        is_directory = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir can raise
        found = (find_checkpoints if recursive else checkpoints_at)(path) if is_directory else ()
        yield from map(str, found) if (recursive and found) or len(found) > 1 else (path,)


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
