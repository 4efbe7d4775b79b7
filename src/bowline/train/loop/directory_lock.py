"""Locking a directory, so that only one process at a time writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bowline.checkpoint.durable.file_creation import cannot_write
from bowline.errors import UsageError

__all__ = ["locked"]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create `directory` if needed and lock it. The lock is released when this context or the process ends.

    On a file system without locks the directory is used without one.

    Raises:
        UsageError: another process holds the lock.
        CheckpointError: the directory cannot be created.
    """
    import fcntl  # Windows does not have it; there this module can only be imported

    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_write(directory, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{directory}: another process is training in this directory",
                help="wait until it ends, or give another directory",
            ) from error
        except OSError:
            pass
        yield
    finally:
        with suppress(OSError):
            os.close(handle)
