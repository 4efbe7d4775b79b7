"""The interface to a checkpoint's files in any place: their names and sizes, and each file as a `ByteSource`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.closeable import Closing
from bowline.errors import FormatError

__all__ = ["FileSet", "SMALL_FILE_LIMIT"]

SMALL_FILE_LIMIT = 256 << 20
"""Configs, indexes and tokenizers are read whole; none of them is larger than this."""


class FileSet(Closing, ABC):
    """The files of one checkpoint. `location` is the text with which a user would open it again."""

    location: str
    parallel_reads: int = 1
    """The number of files to read at once: one from a disk, several over a network."""
    parameters: Mapping[str, int] = MappingProxyType({})
    """The number of parameters by dtype that the place states for its safetensors; empty if it states none."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Every file's size in bytes, by name; names use `/` and are relative to the checkpoint."""

    @abstractmethod
    def open(self, name: str) -> ByteSource:
        """Open a file; the caller closes it."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a file of this name."""
        return name in self.sizes()

    def place_of(self, name: str) -> str:
        """The text with which a user would open this one file."""
        return f"{self.location}/{name}"

    def way_out(self, name: str) -> str | None:
        """A phrase that says how `name` leads out of the checkpoint, or `None` when it stays inside."""
        return None

    def open_outside(self, name: str) -> ByteSource:
        """Open a file of the checkpoint as loaders do: through a link that leads out of it too."""
        return self.open(name)

    def read(self, name: str, *, outside: bool = False) -> bytes:
        """Read a whole small file; with `outside`, through a link that leads out of the checkpoint too."""
        with self.open_outside(name) if outside else self.open(name) as source:
            if source.size > SMALL_FILE_LIMIT:
                raise FormatError(
                    f"{name}: {source.size} bytes, expected at most {SMALL_FILE_LIMIT} for a file that is read whole",
                    help="it is too large for the JSON file that its name suggests; fetch it again",
                )
            return source.read_at(0, source.size)
