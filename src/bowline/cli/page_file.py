"""Checks the place of a page before the page is made."""

from __future__ import annotations

import os
from pathlib import Path

from bowline.errors import UsageError

__all__ = ["check_can_write"]

ENDINGS = (".html", ".htm")


def check_can_write(file: Path) -> None:
    """Before the work that a page shows: whether it will have a place.

    Raises:
        UsageError: the name has another ending, or the directory is missing or cannot be written.
    """
    if file.suffix.lower() not in ENDINGS:
        raise UsageError(f"{file}: expected a file name that ends in .html", help=f"use {file.with_suffix('.html')}")
    if not os.path.isdir(file.parent):  # noqa: PTH112 - Path.is_dir can raise
        raise UsageError(
            f"{file}: the directory {file.parent} does not exist", help="give a file in an existing directory"
        )
    if os.path.isdir(file) or not os.access(file.parent, os.W_OK):  # noqa: PTH112
        raise UsageError(f"{file}: cannot be written", help="give a file in a directory that can be written")
