"""Finds out whether a path means a PEFT adapter, not a whole model."""

from __future__ import annotations

import os
from pathlib import Path

from bowline.checkpoint.checkpoint import HUB_NAME
from bowline.checkpoint.formats.other_files import ADAPTER_CONFIG, ADAPTER_FILES
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.checkpoint.weights import INDEX_SUFFIX, SINGLE_FILES

__all__ = ["adapter_files", "is_adapter"]

WHOLE = frozenset({*SINGLE_FILES, *(single + INDEX_SUFFIX for single in SINGLE_FILES)})
"""The files of a whole model; an adapter's config beside them does not make it an adapter."""


def adapter_files(place: str | os.PathLike[str], *, hub: bool = True) -> FileSet | None:
    """The files of the adapter at `place`: a directory, one of an adapter's files, or (`hub`) a Hub repository.

    `None` if it is no adapter. The caller closes the files. Raises `CheckpointError` if the place cannot be listed.
    """
    name = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(name, str) or not name:
        return None
    path = Path(name)
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a folder on the way may not be searched
        return _if_adapter(LocalDirectory(path))
    if os.path.lexists(path):
        ours = path.name == ADAPTER_CONFIG or path.name in ADAPTER_FILES
        return _if_adapter(LocalDirectory(path.parent), asked=True) if ours else None
    if hub and isinstance(place, str) and HUB_NAME.fullmatch(name):
        from bowline.checkpoint.places.hub import HubRepository  # imported only when the Hub is needed

        return _if_adapter(HubRepository.open_repository(name))
    return None


def is_adapter(place: str | os.PathLike[str], *, hub: bool = True) -> bool:
    """Whether `adapter_files` finds an adapter at `place`."""
    files = adapter_files(place, hub=hub)
    if files is not None:
        files.close()
    return files is not None


def _if_adapter(files: FileSet, *, asked: bool = False) -> FileSet | None:
    """These files if they are an adapter's; `asked` means that one of its files was given by name."""
    names = files.sizes()
    if ADAPTER_CONFIG in names and (asked or not WHOLE & names.keys()):
        return files
    files.close()
    return None
