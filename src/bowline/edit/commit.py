"""Writes a plan's result, verifies it, and puts it in place in one step; records how to undo it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bowline.auditing import audit
from bowline.auditing.audit_report import AuditReport
from bowline.auditing.progress import Progress
from bowline.checkpoint.durable.file_creation import cannot_write, copy_attributes, create, flushing
from bowline.checkpoint.durable.file_publication import publishing_files
from bowline.checkpoint.durable.hard_links import carry_over, copy_file, link_or_copy
from bowline.checkpoint.durable.publication import clear_leftovers, locked, publishing
from bowline.checkpoint.durable.undo_entries import MANIFEST, UNDO_DIRECTORY, FileChange, UndoEntry, entry_name
from bowline.checkpoint.formats.safetensors_writer import Extent, write_payloads
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.history import remove_undone
from bowline.edit.plan import Action, EditPlan, FileParts, FilePlan, size
from bowline.edit.verification import verify
from bowline.errors import CheckpointError, UsageError

__all__ = ["EditReport", "Fingerprint", "commit", "fingerprint"]

Fingerprint = Mapping[str, tuple[int, int, int, int]]
"""By name: a file's device, inode, size and time."""
SKIPPED = frozenset({".bowline", ".git", ".cache"})
"""Directories of a source that a new directory does not get."""
WORTH_FLUSHING = 64 << 20
"""Bytes from which a file is given to the disk while it is written."""
WORTH_A_LINK = 1 << 20
"""Smaller files are copied into a new directory: whoever edits one there should not change the source's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """What was done: the plan, where its result is, what was compared, and what the audit of the result says."""

    plan: EditPlan
    place: Path
    findings: tuple[str, ...]
    clean: bool
    notes: tuple[str, ...]
    compared: int = 0
    """Bytes of the result that were read again and compared with their source."""
    checked: tuple[str, ...] = ()
    """The results of the steps' own checks, a sentence each."""
    kept_in: Path | None = None
    """The directory that keeps the old files, after an edit in place."""
    unchanged: bool = False
    """True for an edit in place that changes nothing; none is recorded then."""

    def lines(self) -> Iterator[str]:
        """The report, a line for each fact."""
        yield from (f"{note}" for note in self.notes)
        yield from self.plan.lines()
        if self.unchanged:
            yield f"{self.place}: there is nothing to change"
            return
        yield f"{self.place}: written; {size(self.compared)} read again and compared"
        yield from (f"  {sentence}" for sentence in self.checked)
        yield from (f"  {note}" for note in _cast_counts(self.plan))
        yield "audit of the result, by its headers:" + (" nothing to report" if not self.findings else "")
        yield from (f"  {finding}" for finding in self.findings)
        if self.kept_in is not None:
            yield f"the old files are kept; `bowline undo {self.place}` brings them back"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def fingerprint(files: LocalDirectory) -> Fingerprint:
    """What identifies the files of a directory at this moment."""
    found = {}
    for name in files.sizes():
        status = (files.path / name).stat()
        found[name] = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return found


def commit(
    plan: EditPlan, seen: Fingerprint, destination: Path | None, *, copy: bool = False, progress: Progress | None = None
) -> EditReport:
    """Write the result to a new directory or file, or in place if `destination` is `None`.

    The result is staged beside its place, read again and compared, audited, and only then put in place, in one step of
    the file system. `copy` makes copies where links would do.

    Raises:
        UsageError: the result is no model, and would take the place of one.
        CheckpointError: the source changed since it was opened, is edited by another process, or is a cache's; there is
            no space or permission; or what was written is not what was planned. Nothing is changed then.
    """
    progress = progress or Progress()
    source = plan.draft.source.files
    if not isinstance(source, LocalDirectory):
        raise UsageError(f"{source.location}: is not on this machine", help="download it, and edit the copy")
    if plan.draft.alone and destination is None:
        raise UsageError(f"{plan.steps[-1]}: its result is no model", help="give a new directory as the destination")
    with ExitStack() as stack:
        if destination is None:
            place = source.path
            stack.enter_context(locked(place))
        else:
            place = destination
        notes = clear_leftovers(place)
        _refuse_if_changed(source, seen)
        if destination is None and not plan.changes:
            return _report(plan, place, notes, audit(place / plan.audited, values=False), unchanged=True)
        if destination is None:
            _refuse_shared_files(plan, place)
        _refuse_if_full(plan, place, copies=copy and destination is not None)
        gone = frozenset(file.name for file in plan.files if file.action is Action.REMOVE)
        with _staging(plan, place, gone, new=destination is not None) as stage:
            _write(plan, stage, progress)
            kept_in = None
            if destination is None:
                kept_in = _keep(plan, place, stage)
                carry_over(place, stage, lambda name: name in gone)
            elif not plan.single:
                _bring(plan, source.path, stage, copy=copy)
                _record(stage, UndoEntry(directory=_entry(stage), why=_why(plan), when="", made_from=str(source.path)))
            compared = verify(plan, stage, progress)
            with closing(LocalDirectory(stage)) as files:
                checked = tuple(check(files) for check in plan.draft.checks)
            report = audit(stage / plan.audited, values=False)
            _refuse_if_changed(source, seen)
        if destination is None:
            remove_undone(place)
    kept = None if kept_in is None else place / kept_in.relative_to(stage)
    return _report(plan, place, notes, report, compared=compared, checked=checked, kept_in=kept)


def _report(plan: EditPlan, place: Path, notes: tuple[str, ...], report: AuditReport, **fields: Any) -> EditReport:
    return EditReport(
        plan=plan,
        place=place,
        findings=tuple(f"{found.code}: {found.message}" for found in report.findings),
        clean=report.clean,
        notes=notes,
        **fields,
    )


def _staging(plan: EditPlan, place: Path, gone: frozenset[str], *, new: bool) -> AbstractContextManager[Path]:
    if plan.single:
        return publishing_files(place)
    return publishing(place, lambda name: name in gone, new=new)


def _why(plan: EditPlan) -> str:
    return "; ".join(map(str, plan.steps))


def _cast_counts(plan: EditPlan) -> Iterator[str]:
    from bowline.edit.content import Cast

    casts = [
        (name, content)
        for file in plan.files
        for name, content in (file.tensors or {}).items()
        if isinstance(content, Cast)
    ]
    for what in ("overflows", "subnormals"):
        found = [(name, getattr(content, what)) for name, content in casts if getattr(content, what)]
        if found:
            total, (worst, most) = sum(count for _, count in found), max(found, key=lambda one: one[1])
            words = "numbers became infinite" if what == "overflows" else "numbers are too small and lost digits"
            yield f"{total:,} {words}, {most:,} of them in {worst}"


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse_shared_files(plan: EditPlan, place: Path) -> None:
    """Raise if a file to change is a link, or has another name: a cache's copy, which others rely on."""
    for file in plan.files:
        path = place / file.name
        if file.action is Action.KEEP or file.is_new or not os.path.lexists(path):
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
            raise CheckpointError(
                f"{path}: {'is a symbolic link' if stat.S_ISLNK(status.st_mode) else 'has several hard links'}, "
                "expected an ordinary file with one name",
                help="give a new directory as the destination",
            )


def _refuse_if_changed(source: LocalDirectory, seen: Fingerprint) -> None:
    try:
        now = fingerprint(LocalDirectory(source.path))
    except OSError:
        now = {}
    changed = [name for name in seen if now.get(name) != seen[name]] + [name for name in now if name not in seen]
    if changed:
        raise CheckpointError(
            f"{source.path / changed[0]}: changed while the edit was prepared; nothing was changed",
            help="run again when no other process writes there",
        )


def _refuse_if_full(plan: EditPlan, place: Path, *, copies: bool) -> None:
    """Raise if the disk has less room than the result needs; what stays needs none where links are possible."""
    needed = plan.written + (plan.kept if copies else 0)
    above = next(parent for parent in (place, *place.absolute().parents) if parent.is_dir())
    found = os.statvfs(above)
    free = found.f_bavail * found.f_frsize
    if needed > free:
        raise CheckpointError(
            f"{place}: {size(needed)} are to be written, but {above} has {size(free)} free",
            help="free space: the old checkpoint is kept beside the new one until that is complete",
        )


# --- the stage -------------------------------------------------------------------------------------------------------


def _write(plan: EditPlan, stage: Path, progress: Progress) -> None:
    progress.expect(2 * plan.written)
    for file in plan.files:
        if file.action is Action.WRITE:
            path = stage / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with os.fdopen(create(path), "wb") as opened:
                    if file.text is not None:
                        opened.write(file.text)
                    elif file.parts is not None:
                        _write_parts(opened, file.parts)
                    else:
                        with flushing(opened.fileno()) if file.nbytes >= WORTH_FLUSHING else nullcontext():
                            write_payloads(opened, file.payloads(), file.metadata)
                if file.name in plan.draft.source.files.sizes():
                    of = Path(plan.draft.source.files.location, file.name)
                    copy_attributes(of.stat(), of, path)
            except OSError as error:
                raise cannot_write(path, error) from error
            progress.advance(file.nbytes)


def _write_parts(opened: BinaryIO, file: FileParts) -> None:
    for part in file.sources():
        if isinstance(part, Extent):
            part.copy_to(opened)
        else:
            opened.write(part)


def _keep(plan: EditPlan, place: Path, stage: Path) -> Path:
    """Give each file that changes a second name in the stage's record of changes."""
    entry = _entry(stage, place)
    entry.mkdir(parents=True)
    files: dict[str, FileChange] = {}
    for file in plan.files:
        if file.action is Action.KEEP:
            continue
        was = (place / file.name).exists()
        if was:
            (entry / file.name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(place / file.name, entry / file.name)
        written = file.action is Action.WRITE
        files[file.name] = FileChange.to(stage / file.name, was=was) if written else FileChange(was=was, now=False)
    (entry / MANIFEST).write_bytes(UndoEntry(directory=entry, why=_why(plan), when="", files=files).manifest())
    return entry


def _entry(stage: Path, place: Path | None = None) -> Path:
    return stage / UNDO_DIRECTORY / entry_name(stage if place is None else place)


def _record(stage: Path, entry: UndoEntry) -> None:
    entry.directory.mkdir(parents=True)
    (entry.directory / MANIFEST).write_bytes(entry.manifest())


def _bring(plan: EditPlan, source: Path, stage: Path, *, copy: bool) -> None:
    """Give a new directory the files that do not change: large ones as hard links where the file system allows it."""
    for file in plan.files:
        if file.action is Action.KEEP:
            _bring_file(file, source, stage, copy=copy)
    if plan.draft.source.only is not None or plan.draft.alone:
        return
    for entry in sorted(source.iterdir()):
        if entry.is_dir() and entry.name not in SKIPPED:
            shutil.copytree(entry, stage / entry.name, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))


def _bring_file(file: FilePlan, source: Path, stage: Path, *, copy: bool) -> None:
    real, target = Path(os.path.realpath(source / file.name)), stage / file.name
    status = real.stat()
    if copy or status.st_size < WORTH_A_LINK:
        copy_file(real, status, target)
        return
    try:
        link_or_copy(real, target)
    except OSError:
        if status.st_dev == stage.stat().st_dev:
            raise
        copy_file(real, status, target)  # on another file system
