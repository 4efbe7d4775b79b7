"""Exchanges the names of two directories, atomically if the file system can."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

from bowline.errors import CheckpointError

__all__ = ["PREVIOUS", "exchange", "put_in_place"]

PREVIOUS = ".previous"
"""The suffix of the old directory's name between the two renames, where there is no atomic exchange."""

_REFUSALS = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM})
"""Error numbers of a kernel, a file system or a sandbox that supports no exchange."""
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2


def exchange(first: Path, second: Path) -> None:
    """Exchange the names `first` and `second` atomically: a reader sees both before the exchange, or both after it.

    Uses Linux's `renameat2(RENAME_EXCHANGE)` (ext4, xfs, btrfs, tmpfs, overlayfs), macOS's `renamex_np(RENAME_SWAP)`.

    Raises:
        OSError: the system refuses; with `ENOSYS` or `EINVAL`, it supports no exchange.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, _RENAME_SWAP)
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first), None, str(second))
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


def put_in_place(stage: Path, place: Path) -> None:
    """Give the directory `stage` the name `place`; a directory that had that name gets the name `stage`.

    Where the system has no exchange, two renames replace it. Between them `place` does not exist, and the old
    directory is whole beside it with the suffix `PREVIOUS`.
    """
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        stage.rename(place)
        return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    try:
        exchange(stage, place)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        _in_two_steps(stage, place)


def _in_two_steps(stage: Path, place: Path) -> None:
    previous = stage.with_suffix(PREVIOUS)
    place.rename(previous)
    try:
        stage.rename(place)
    except BaseException as error:
        try:
            previous.rename(place)
        except OSError:
            if not place.is_dir():
                raise CheckpointError(
                    f"{place}: could not be replaced by the new checkpoint; the old one is complete at {previous}",
                    help=f"mv {previous} {place}",
                ) from error
            shutil.rmtree(previous, ignore_errors=True)  # another publisher was quicker: the old one is obsolete
        raise
    with suppress(OSError):  # a leftover under either name
        previous.rename(stage)
