"""No garbage collections for a moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """For work of milliseconds that makes thousands of objects and keeps them.

    Their number alone would set off a collection, which goes through everything that the process has, and where
    transformers is imported takes longer than the work.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
