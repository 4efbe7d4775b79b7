"""Carries files from an old directory over to its replacement as hard links, without copying bytes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bowline.checkpoint.durable.file_creation import copy_attributes, create

__all__ = ["carry_over", "copy_file", "link_or_copy"]

_NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Error numbers of a file system without hard links, or of a kernel that refuses them for another user's file."""


def carry_over(old: Path, new: Path, replaces: Callable[[str], bool]) -> None:
    """Give `new` every entry of `old` that it lacks, except files for whose name `replaces` returns True.

    A file gets a hard link, or is copied where links are refused; a symbolic link is made anew and never followed. A
    subdirectory is carried over whole, without asking `replaces`; if `new` has one of that name, it gets the entries
    that it lacks. A file of `new` that replaces an ordinary file takes over its owner, mode and extended attributes.
    Entries that vanish from `old` meanwhile are skipped, and no file of `new` is written to.

    Raises:
        OSError: an entry cannot be read or made; `EXDEV` for one that is on another file system, `EISDIR` for a
            subdirectory whose name `new` has for a file.
    """
    device = old.stat().st_dev
    with os.scandir(old) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, FileExistsError):  # another process removed it, or made it first
                _carry(entry, new / entry.name, device, replaces)


def _carry(entry: os.DirEntry[str], target: Path, device: int, replaces: Callable[[str], bool]) -> None:
    path, status = Path(entry.path), entry.stat(follow_symlinks=False)
    if entry.is_dir(follow_symlinks=False):
        if status.st_dev != device:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), entry.path)
        if not os.path.lexists(target):
            target.mkdir(0o700)
        elif target.is_symlink() or not target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), entry.path)
        carry_over(path, target, lambda name: False)
        copy_attributes(status, path, target)
    elif os.path.lexists(target):
        if stat.S_ISREG(status.st_mode) and stat.S_ISREG(target.lstat().st_mode) and not path.samefile(target):
            copy_attributes(status, path, target)
    elif not replaces(entry.name):
        link_or_copy(path, target)


def link_or_copy(path: Path, target: Path) -> None:
    """Give a file a second name, or a copy of it where links are refused; a symbolic link is made anew."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        target.symlink_to(path.readlink())
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _NO_LINKS or not stat.S_ISREG(status.st_mode):
            raise
        copy_file(path, status, target)


def copy_file(path: Path, status: os.stat_result, target: Path) -> None:
    """Copy a file with its owner, mode, extended attributes and times."""
    with path.open("rb") as source, os.fdopen(create(target, 0o600), "wb") as copy:
        shutil.copyfileobj(source, copy)
    copy_attributes(status, path, target)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
