"""Pauses garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Pauses garbage collection during milliseconds of work that creates and keeps thousands of objects.

    Their number alone would trigger a collection, which visits all objects of the process, and, once transformers is
    imported, takes longer than the work.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
