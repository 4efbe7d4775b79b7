"""Checkpoint files in a directory of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from bowline.checkpoint.places.byte_source import LocalFile
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, NoCheckpointError

__all__ = ["LocalDirectory", "directories_where"]


class LocalDirectory(FileSet):
    """A checkpoint directory; it opens only files inside it, even if an index or a link leads outside.

    Only `open_outside` follows such a link, for a name that the directory itself lists. The Hub's cache keeps a
    snapshot as links into a `blobs` directory beside it: such links stay within the repository and are followed. Any
    other way out is refused.

    Raises:
        NoCheckpointError: the directory does not exist.
        CheckpointError: it cannot be listed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.location = os.fspath(path)
        try:
            self._root = self.path.resolve(strict=True)
            with os.scandir(self.path) as entries:
                self._sizes = dict(sorted(_regular_files(entries)))
        except FileNotFoundError as error:
            raise NoCheckpointError(f"{path}: no such directory", help="check the path") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links in Python 3.11
            reason = getattr(error, "strerror", None) or "a loop of symbolic links"
            raise CheckpointError(
                f"{path}: cannot be listed: {reason}", help="check the path, its links and its permissions"
            ) from error

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> LocalFile:
        escape = self.way_out(name)
        if escape:
            raise CheckpointError(
                f"{self.location}: {name!r} {escape}, expected a file inside the checkpoint",
                help="move the file itself into the directory",
            )
        return LocalFile(self.path / name, name)

    def open_outside(self, name: str) -> LocalFile:
        return LocalFile(self.path / name, name) if name in self._sizes else self.open(name)

    def has(self, name: str) -> bool:
        return name in self._sizes or (self.way_out(name) is None and os.path.lexists(self.path / name))

    def way_out(self, name: str) -> str | None:
        """A phrase that says how `name` leads out of the directory, or `None` when it stays inside."""
        pure = PurePosixPath(name)
        if pure.is_absolute():
            return "is an absolute path"
        if ".." in pure.parts:
            return "leaves the directory with '..'"
        if not pure.parts or "\0" in name or "\\" in name:
            return "is not a file name"
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            return "cannot be encoded as a file name in this locale"
        try:
            real = (self.path / name).resolve()
        except (OSError, RuntimeError):
            return None  # a loop of links: opening it says so
        inside = (self._root, *_hub_cache_blobs(self._root))
        if not any(real.is_relative_to(directory) for directory in inside):
            return "is a link that leads out of the directory"
        return None


def directories_where(
    root: str | os.PathLike[str], accept: Callable[[list[str]], bool], limit: int | None = None
) -> list[Path]:
    """`root` and the directories below it whose file names `accept` takes; numbers in names are sorted by value.

    Links to directories and hidden directories are not entered, and what cannot be listed is left out. At most `limit`
    directories are looked at.
    """
    found = [Path(where) for where, names in islice(_walk(root), limit) if accept(names)]
    return sorted(found, key=lambda path: [_by_value(part) for part in path.parts])


def _walk(root: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    for where, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield where, names


def _by_value(name: str) -> list[tuple[int, str]]:
    """A key by which checkpoint-500 comes before checkpoint-1000."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _regular_files(entries: os._ScandirIterator[str]) -> list[tuple[str, int]]:
    found = []
    for entry in entries:
        try:
            if entry.is_file():
                found.append((entry.name, entry.stat().st_size))
            elif entry.is_symlink() and not entry.is_dir():
                found.append((entry.name, 0))  # broken or looping: opening it will say so
        except OSError:
            found.append((entry.name, 0))
    return found


def _hub_cache_blobs(root: Path) -> tuple[Path, ...]:
    """The `models--org--name/blobs` that holds the bytes of a `models--org--name/snapshots/<commit>` or its folders."""
    return tuple(
        directory.parent / "blobs"
        for directory in root.parents
        if directory.name == "snapshots" and directory.parent.name.startswith("models--")
    )
