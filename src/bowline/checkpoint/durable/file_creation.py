"""Creates files durably: exclusively, synchronised to disk, with the attributes of the file that they replace."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bowline.errors import CheckpointError

__all__ = ["DISK_FULL", "cannot_write", "copy_attributes", "create", "fill", "flushing", "synchronise"]

FLUSH_SECONDS = 0.02
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk, a used-up quota, and the process's limit on file sizes."""

_WAYS_OUT = {
    errno.EACCES: "check the permissions of the directory and of the one that holds it",
    errno.EPERM: "check the permissions of the directory and of the one that holds it",
    errno.EROFS: "write to a file system that is not read-only",
    errno.EEXIST: "write into an empty directory",
    errno.EBUSY: "it is a mount point, which cannot be replaced: give a directory below it",
    errno.ENOTDIR: "a part of the path is a file, not a directory: give another path",
    errno.EISDIR: "a subdirectory there has the name of a new file: rename it, or give another directory",
    errno.EXDEV: "it is or contains a mount point: give a directory below it, or one without mounts",
}


def create(path: Path, mode: int = 0o666) -> int:
    """Create a file with `mode` less the umask, and return its descriptor; fails if the name exists, even as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def fill(descriptor: int, content: bytes, mode: int) -> None:
    """Write `content`, set the mode regardless of the umask, synchronise, and close."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def synchronise(path: Path) -> None:
    """Return when a file's bytes, or a directory's names, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def flushing(descriptor: int) -> Iterator[None]:
    """Let the disk take what is written to a file while more is written: the last `fsync` then has little to wait for.

    It promises nothing: errors of the disk show at that `fsync`.
    """
    done = threading.Event()

    def flush() -> None:
        while not done.wait(FLUSH_SECONDS):
            with suppress(OSError):
                os.fdatasync(descriptor)

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def copy_attributes(status: os.stat_result, path: Path, staged: Path) -> None:
    """Copy owner, mode and extended attributes, as far as permissions and the file system allow."""
    with suppress(OSError):
        os.chown(staged, status.st_uid, status.st_gid)
    staged.chmod(status.st_mode & 0o7777)  # after the owner: a change of owner clears bits
    if hasattr(os, "listxattr"):
        with suppress(OSError):
            for name in os.listxattr(path):
                os.setxattr(staged, name, os.getxattr(path, name))


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error to raise when the system refuses to write at `path`, with a way out."""
    if error.errno in DISK_FULL:
        way_out = "free space: the old checkpoint is kept beside the new one until that is complete"
    else:
        way_out = _WAYS_OUT.get(error.errno or 0, "check the directory's permissions and space")
    return CheckpointError(f"{path}: cannot be written: {error.strerror or error}", help=way_out)
