"""How far an audit is, for whoever waits for it."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Told what will be read and what has been; this one says nothing to anybody."""

    def expect(self, count: int) -> None:
        """So many bytes of tables will be read."""

    def advance(self, count: int) -> None:
        """So many more have been; called from several threads."""
