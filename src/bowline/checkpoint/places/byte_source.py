"""Files as random access: a size, and exact ranges of bytes."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from mmap import ACCESS_COPY, mmap
from pathlib import Path

from bowline.checkpoint.places.closeable import Closing
from bowline.errors import CheckpointError, FormatError

__all__ = ["ByteSource", "LocalFile", "MemoryBytes"]

WORTH_READING_AHEAD = 256 << 10
READ_AHEAD = 4 << 20


class ByteSource(Closing, ABC):
    """A file of `size` bytes with random access: a read gives the exact range or raises an error.

    `name` is the file's name within its checkpoint, for messages. There are no short reads: an implementation of
    `_fill` fills the whole buffer or raises a `CheckpointError`.
    """

    name: str
    size: int

    @abstractmethod
    def _fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the range is known to lie within the file."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset`, without allocating memory."""
        self._check(offset, buffer.nbytes)
        if buffer.nbytes:
            self._fill(offset, buffer)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset`."""
        self._check(offset, length)  # before memory is allocated
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(
                f"{self.name}: bytes {offset} to {offset + length} were requested, but the file has {self.size}",
                help="the file is truncated or its header is wrong; fetch it again",
            )


class MemoryBytes(ByteSource):
    """Bytes that are already in memory."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.size = len(data)
        self._data = data

    def _fill(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]


class LocalFile(ByteSource):
    """A file on this machine, read with `pread`: if it is truncated meanwhile, that is an error, not a crash.

    Raises:
        CheckpointError: it cannot be opened or read (the system's reason is given), or is not a regular file.
        FormatError: it ends before the range does.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name if name is not None else self.path.name
        self._fd = -1
        self._asked = (0, 0)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not block
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{self.path}: not a regular file", help="give a file or a directory of files")
        self.size = status.st_size

    def _fill(self, offset: int, buffer: memoryview) -> None:
        if len(buffer) >= WORTH_READING_AHEAD and hasattr(os, "posix_fadvise"):
            self._read_ahead(offset, offset + len(buffer))
        done = 0
        while done < len(buffer):  # the system may give less than was asked for
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise FormatError(
                    f"{self.name}: the file ended at byte {offset + done} while it was read; it had {self.size} bytes",
                    help="another process is rewriting it; run again when that is done",
                )
            done += count

    def _read_ahead(self, offset: int, end: int) -> None:
        """Ask the disk to read on while blocks are processed; once for many blocks, since asking takes time too."""
        first, last = self._asked
        if first <= offset and (end + READ_AHEAD // 2 <= last or last == self.size):
            return
        self._asked = offset, min(max(offset + READ_AHEAD, end), self.size)
        os.posix_fadvise(self._fd, offset, self._asked[1] - offset, os.POSIX_FADV_WILLNEED)

    def extent(self, offset: int, length: int) -> tuple[int, int, int]:
        """A range as the system's own copy takes it: descriptor, offset, length. Raises as `read_at` does."""
        self._check(offset, length)
        return self._fd, offset, length

    def map(self) -> mmap:
        """Map the file copy on write: pages are read from disk on access, and changes stay private.

        If the file is truncated while mapped, an access crashes the process; replacing the file by another, as
        Bowline does, is harmless.
        """
        try:
            return mmap(self._fd, self.size, access=ACCESS_COPY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"{self.path}: cannot be mapped: {reason}", help="load it with mmap=False") from error

    def _unreadable(self, error: OSError) -> CheckpointError:
        reason = error.strerror or type(error).__name__
        return CheckpointError(
            f"{self.path}: cannot be read: {reason}", help="check the path, its links and its permissions"
        )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
