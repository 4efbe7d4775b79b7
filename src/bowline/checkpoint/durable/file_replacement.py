"""Replaces one small file of a checkpoint atomically, and keeps the old bytes."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from errno import ENOTDIR
from pathlib import Path

from bowline.checkpoint.durable.file_creation import copy_attributes, create, fill, synchronise
from bowline.checkpoint.durable.undo_entries import (
    MANIFEST,
    UNDO_DIRECTORY,
    FileChange,
    UndoEntry,
    entry_name,
)
from bowline.errors import ConfigError

__all__ = ["replace_file", "replace_own"]


def replace_file(path: Path, content: bytes, *, why: str) -> Path:
    """Write `content` in place of `path`, atomically; returns the directory that keeps the old file.

    The old bytes are written and synchronised first, with a `manifest.json` that holds the file's name and its digests
    before and after. The new bytes are written to a file beside `path` and synchronised, and that file takes the name:
    a reader sees the old file or the new one, even if the machine stops. Mode, owner and extended attributes are kept.

    Raises:
        ConfigError: `path` is a symbolic link or has several names (as a cache's copy does), or the directory cannot be
            written, or its `.bowline` is a link.
    """
    try:
        status = path.lstat()
        before = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}", help="check the path and its permissions"
        ) from error
    if path.is_symlink() or status.st_nlink > 1:
        raise ConfigError(
            f"{path}: {'is a symbolic link' if path.is_symlink() else 'has several hard links'}, "
            "expected an ordinary file with one name",
            help="copy the checkpoint out of the cache, and fix the copy",
        )
    try:
        backup = _backup_directory(path)
        try:
            _keep(backup, path, before, content, why, status.st_mode & 0o7777)
            _put_in_place(path, content, status)
        except BaseException:
            _forget(backup, path, before)
            raise
        synchronise(path.parent)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be replaced: {error.strerror or error}", help="check the directory's permissions and space"
        ) from error
    return backup


def replace_own(path: Path, content: bytes) -> None:
    """Write `content` in place of a file of Bowline's own record, atomically; its old bytes are not kept."""
    _put_in_place(path, content, path.stat())
    synchronise(path.parent)


def _put_in_place(path: Path, content: bytes, status: os.stat_result) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    descriptor = create(staged, status.st_mode & 0o7777)
    try:
        fill(descriptor, content, status.st_mode & 0o7777)
        copy_attributes(status, path, staged)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _backup_directory(path: Path) -> Path:
    """Make a new backup directory under `UNDO_DIRECTORY`."""
    root = path.parent / UNDO_DIRECTORY
    for directory in (root.parent, root):  # one by one, so that a link in the checkpoint is not followed
        directory.mkdir(exist_ok=True)
        if directory.is_symlink():
            raise NotADirectoryError(ENOTDIR, f"{directory} is a symbolic link, expected a directory")
    while True:
        backup = root / entry_name(path.parent)
        with suppress(FileExistsError):  # another process was quicker
            backup.mkdir()
            return backup


def _keep(backup: Path, path: Path, before: bytes, after: bytes, why: str, mode: int) -> None:
    _write(backup / path.name, before, mode)
    change = FileChange(sha256_before=_digest(before), sha256_after=_digest(after))
    entry = UndoEntry(directory=backup, why=why, when=backup.name, files={path.name: change})
    _write(backup / MANIFEST, entry.manifest(), 0o644)
    synchronise(backup)


def _forget(backup: Path, path: Path, before: bytes) -> None:
    """Remove the backup of a file that is unchanged, and the empty directories around it."""
    with suppress(OSError):
        if path.read_bytes() != before:
            return
        for name in (path.name, MANIFEST):
            (backup / name).unlink(missing_ok=True)
        for directory in (backup, *list(backup.parents)[:2]):
            directory.rmdir()


def _write(path: Path, content: bytes, mode: int) -> None:
    fill(create(path, mode), content, mode)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
