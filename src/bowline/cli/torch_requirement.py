"""What a verb needs beyond the basics, said plainly where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bowline.errors import UsageError, how_to_install

__all__ = ["needs_torch"]


@contextmanager
def needs_torch(verb: str) -> Iterator[None]:
    """Around the imports of a verb that runs models.

    Raises:
        UsageError: torch, or what is installed with it, is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "tokenizers"):
            raise
        raise UsageError(
            f"bowline {verb} needs {error.name}, which is not installed", help=how_to_install("torch")
        ) from None
