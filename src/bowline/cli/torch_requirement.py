"""Reports torch as missing, with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bowline.errors import UsageError, how_to_install

__all__ = ["needs_torch"]


@contextmanager
def needs_torch(verb: str) -> Iterator[None]:
    """Wrap the imports of a command that runs models.

    Raises:
        UsageError: torch, or a package that is installed with it, is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "tokenizers"):
            raise
        raise UsageError(
            f"bowline {verb} needs {error.name}, which is not installed", help=how_to_install("torch")
        ) from None
