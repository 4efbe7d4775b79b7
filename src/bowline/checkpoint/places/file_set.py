"""A checkpoint's files, wherever they are: names with sizes, each opened as a `ByteSource`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.closeable import Closing
from bowline.errors import FormatError

__all__ = ["FileSet", "SMALL_FILE_LIMIT"]

SMALL_FILE_LIMIT = 256 << 20
"""Configs, indexes and tokenizers are read whole; none of them is larger than this."""


class FileSet(Closing, ABC):
    """The files of one checkpoint. `location` is what a person would type to get here again."""

    location: str
    parallel_reads: int = 1
    """How many files are worth reading at once: one from a disk, several over a network."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Every file's size in bytes, by name; names use `/` and are relative to the checkpoint."""

    @abstractmethod
    def open(self, name: str) -> ByteSource:
        """The file as random access; the caller closes it."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self.sizes()

    def way_out(self, name: str) -> str | None:
        """How `name` would leave the checkpoint (a phrase for a message), or `None` when it stays inside."""
        return None

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        with self.open(name) as source:
            if source.size > SMALL_FILE_LIMIT:
                raise FormatError(
                    f"{name}: {source.size} bytes, expected at most {SMALL_FILE_LIMIT} for a file that is read whole",
                    help="this is not the JSON file that its name promises",
                )
            return source.read_at(0, source.size)
