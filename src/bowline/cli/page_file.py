"""Checks the place of a page before the page is made."""

from __future__ import annotations

import os
from pathlib import Path

from bowline.errors import UsageError

__all__ = ["check_can_write"]

ENDINGS = (".html", ".htm")
LONGEST_NAME = 255
"""Bytes of a file's name that file systems allow."""


def check_can_write(file: Path) -> None:
    """Before the work that a page shows: whether it will have a place.

    Raises:
        UsageError: the name has another ending or is too long, it is a directory, or the directory that it is in is
            missing or cannot be written.
    """
    if file.suffix.lower() not in ENDINGS:
        named = file.name.strip(".") not in ("", "html", "htm")
        raise UsageError(
            f"{file}: expected a file name that ends in .html",
            help=f"use {file.with_suffix('.html') if named else 'report.html'}",
        )
    if len(os.fsencode(file.name)) > LONGEST_NAME:
        raise UsageError(
            f"{file}: the file name is too long: {len(os.fsencode(file.name))} bytes, expected at most {LONGEST_NAME}",
            help="give a shorter name",
        )
    if os.path.isdir(file):  # noqa: PTH112 - Path.is_dir can raise
        raise UsageError(f"{file}: is a directory, expected a file", help=f"use {file / 'report.html'}")
    if not os.path.isdir(file.parent):  # noqa: PTH112
        raise UsageError(
            f"{file}: the directory {file.parent} does not exist", help="give a file in an existing directory"
        )
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file}: cannot be written", help="give a file in a directory that can be written")
