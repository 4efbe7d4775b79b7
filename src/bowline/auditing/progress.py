"""The interface through which an audit reports its progress."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Receives the number of bytes to read and those read so far. This base class ignores both."""

    def expect(self, count: int) -> None:
        """`count` bytes of tables will be read."""

    def advance(self, count: int) -> None:
        """`count` more bytes have been read; called from several threads."""
