"""A directory that one process at a time writes to."""

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
    """Make `directory` where it is not there, and hold it: until this ends, however it ends, nobody else can.

    A file system without locks is written to without one.

    Raises:
        UsageError: another process has it.
        CheckpointError: it cannot be made.
    """
    import fcntl  # not on Windows, where no more of this file works than its import

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
                f"{directory}: another process is training there", help="wait for it, or give another directory"
            ) from error
        except OSError:
            pass
        yield
    finally:
        with suppress(OSError):
            os.close(handle)
