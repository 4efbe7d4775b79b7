"""What was changed in a checkpoint's directory, and how to bring the old bytes back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from bowline.checkpoint.durable.file_replacement import replace_own
from bowline.checkpoint.durable.hard_links import link_or_copy
from bowline.checkpoint.durable.publication import clear_leftovers, locked, publishing
from bowline.checkpoint.durable.undo_entries import MANIFEST, UNDO_DIRECTORY, UndoEntry, entries_of
from bowline.errors import CheckpointError, UsageError

__all__ = ["forget", "history", "remove_undone", "undo"]


def history(place: Path) -> tuple[UndoEntry, ...]:
    """The changes that were recorded in a directory, the oldest first, without those that were undone.

    Raises:
        CheckpointError: there is no such directory, or the record cannot be read.
    """
    if not place.is_dir():
        raise CheckpointError(f"{place}: no such directory", help="give the checkpoint's directory")
    return tuple(entry for entry in entries_of(place) if not entry.undone)


def undo(place: Path) -> tuple[UndoEntry, tuple[str, ...]]:
    """Bring back the bytes before the last change; returns its record, and what a stopped process had left.

    Raises:
        UsageError: nothing is recorded, or the old files were forgotten.
        CheckpointError: a file has changed since, another process edits the directory, or it cannot be written.
    """
    with locked(place):
        notes = clear_leftovers(place)
        changes = history(place)
        if not changes:
            raise UsageError(f"{place}: no edit is recorded here, so there is nothing to undo")
        last = changes[-1]
        if last.made_from is not None:
            raise UsageError(
                f"{place}: was made from {last.made_from} by {last.why!r}, and not changed since",
                help="remove the directory: the source is as it was",
            )
        if last.forgotten:
            raise UsageError(f"{place}: the files before {last.why!r} were forgotten, so it cannot be undone")
        for name, change in last.files.items():
            if not change.holds(place / name):
                raise CheckpointError(
                    f"{place / name}: has changed since {last.why!r}; undoing that would lose the change",
                    help=f"the old files are in {last.directory}",
                )
            if change.was and not (last.directory / name).exists():
                raise CheckpointError(f"{last.directory / name}: is missing, so the old bytes cannot be brought back")
        added = frozenset(name for name, change in last.files.items() if not change.was)
        with publishing(place, lambda name: name in added) as stage:
            for name, change in last.files.items():
                if change.was:
                    (stage / name).parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(last.directory / name, stage / name)
            record = stage / UNDO_DIRECTORY / last.directory.name / MANIFEST
            record.parent.mkdir(parents=True)
            record.write_bytes(replace(last, undone=True).manifest())
        remove_undone(place)
    return last, notes


def forget(place: Path) -> int:
    """Remove the old files of every change, which can then no longer be undone; returns how many bytes that frees."""
    freed = 0
    with locked(place):
        clear_leftovers(place)
        for entry in history(place):
            if not entry.can_be_undone:
                continue
            replace_own(entry.directory / MANIFEST, replace(entry, forgotten=True).manifest())
            for name, change in entry.files.items():
                kept = entry.directory / name
                if change.was and kept.exists():
                    freed += kept.stat().st_size
                    kept.unlink()
        remove_undone(place)
    return freed


def remove_undone(place: Path) -> None:
    """Remove the records of changes that were undone: their old files are the directory's own again."""
    for entry in entries_of(place):
        if entry.undone:
            shutil.rmtree(entry.directory, ignore_errors=True)
    root = place / UNDO_DIRECTORY
    for directory in (root, root.parent):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
