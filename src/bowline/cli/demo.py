"""`bowline demo`"""

from __future__ import annotations

__all__ = ["demo"]


def demo() -> None:
    """Audit a real checkpoint beside broken ones."""
