"""The record of changes in a checkpoint's directory: for each, the old files and what became of them.

An entry is a directory `.bowline/undo/<time>` with the old files under their names and a `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bowline.checkpoint.formats.strict_json import loads
from bowline.errors import CheckpointError, FormatError

__all__ = ["MANIFEST", "UNDO_DIRECTORY", "FileChange", "UndoEntry", "entries_of", "entry_name"]

UNDO_DIRECTORY = ".bowline/undo"
MANIFEST = "manifest.json"
NAME = re.compile(r"(\d{8}T\d{6}Z)(?:-(\d+))?")
WORTH_A_DIGEST = 16 << 20
"""Bytes up to which a file is identified by its digest; a larger one by its size and its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """What became of one file. `was` and `now` say whether it existed before and exists after the change."""

    was: bool = True
    now: bool = True
    sha256_before: str | None = None
    sha256_after: str | None = None
    bytes_after: int | None = None
    mtime_after_ns: int | None = None

    @classmethod
    def to(cls, path: Path, *, was: bool) -> FileChange:
        """The change that ends in this file."""
        status = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size <= WORTH_A_DIGEST else None
        return cls(was=was, sha256_after=digest, bytes_after=status.st_size, mtime_after_ns=status.st_mtime_ns)

    def holds(self, path: Path) -> bool:
        """Whether the file is still as the change left it."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return not self.now
        if not self.now or (self.bytes_after is not None and self.bytes_after != status.st_size):
            return False
        if self.sha256_after is not None:
            return hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256_after
        return self.mtime_after_ns == status.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoEntry:
    """One change: its directory, the reason, the time, and its files. `made_from` names the source of a new directory.

    The old files of an entry that is `undone` or `forgotten` are not kept.
    """

    directory: Path
    why: str
    when: str
    files: Mapping[str, FileChange] = field(default_factory=dict)
    made_from: str | None = None
    undone: bool = False
    forgotten: bool = False

    def manifest(self) -> bytes:
        """The content of its `manifest.json`."""
        files = {
            name: {
                key: value
                for key in FileChange.__dataclass_fields__
                if (value := getattr(change, key)) is not None and value is not True
            }
            for name, change in self.files.items()
        }
        content: dict[str, Any] = {"version": 1, "why": self.why, "files": files}
        content |= {key: getattr(self, key) for key in ("made_from", "undone", "forgotten") if getattr(self, key)}
        return json.dumps(content, indent=2).encode() + b"\n"

    @property
    def can_be_undone(self) -> bool:
        """Whether its old files are kept."""
        return not (self.undone or self.forgotten or self.made_from is not None)


def entries_of(place: Path) -> tuple[UndoEntry, ...]:
    """Every recorded change of the checkpoint in this directory, the oldest first.

    Raises:
        CheckpointError: the record cannot be read.
    """
    root = place / UNDO_DIRECTORY
    try:
        if root.is_symlink() or root.parent.is_symlink():
            raise CheckpointError(f"{root}: is a symbolic link, expected a directory", help="remove the link")
        names = sorted((name for name in os.listdir(root) if NAME.fullmatch(name)), key=_order)  # noqa: PTH208
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(
            f"{root}: cannot be read: {error.strerror or error}", help="check its permissions"
        ) from error
    found = (_entry(root / name) for name in names)
    return tuple(entry for entry in found if entry is not None)


def entry_name(place: Path) -> str:
    """A name for the next entry, which sorts after all others even if the clock went back."""
    taken: list[str] = []
    with suppress(FileNotFoundError):
        taken = [name for name in os.listdir(place / UNDO_DIRECTORY) if NAME.fullmatch(name)]  # noqa: PTH208
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    last = max(map(_order, taken), default=("", 0))
    if last[0] < stamp:
        return stamp
    return f"{last[0]}-{last[1] + 1}"


def _order(name: str) -> tuple[str, int]:
    parts = NAME.fullmatch(name)
    assert parts is not None
    return parts[1], int(parts[2] or 0)


def _entry(directory: Path) -> UndoEntry | None:
    """The entry, or `None` for a directory without a manifest: a stopped process left it before its change."""
    path = directory / MANIFEST
    try:
        content: Any = loads(path.read_bytes(), MANIFEST)
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}", help="remove it if nothing is to be undone"
        ) from error
    try:
        files = {str(name): _change(raw) for name, raw in content["files"].items() if _is_inside(name)}
        if len(files) < len(content["files"]):
            raise ValueError
        return UndoEntry(
            directory=directory,
            why=str(content["why"]),
            when=directory.name[:16],
            files=files,
            made_from=content.get("made_from"),
            undone=content.get("undone") is True,
            forgotten=content.get("forgotten") is True,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected 'why' and 'files', a map from file names to what became of them",
            help="remove it if nothing is to be undone",
        ) from error


def _change(raw: Mapping[str, Any]) -> FileChange:
    return FileChange(**{key: raw[key] for key in FileChange.__dataclass_fields__ if key in raw})


def _is_inside(name: str) -> bool:
    return bool(name) and name != MANIFEST and not Path(name).is_absolute() and ".." not in Path(name).parts
