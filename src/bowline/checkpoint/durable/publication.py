"""Publishing a checkpoint directory: a reader finds the old one whole or the new one whole, whenever the machine stops.

The new files are written into a hidden directory beside the old one. What they do not replace is carried over, all of
it is synchronised, and then the two directories exchange their names in one step of the file system.

What a reader may see
    Through a descriptor of the directory (`os.open(directory, os.O_RDONLY)`, then `dir_fd=`): files of one checkpoint
    only. Once it is replaced, its files vanish: a file that was open stays readable, one that was not is missing, and
    the reader begins again. By path: each file is whole, and of the old checkpoint or the new one; two files opened
    on either side of the exchange are of different ones. A reader that finds the same directory (`os.path.samestat`)
    at the path after its last `open` as it had open before the first has one checkpoint.

What a kill leaves
    The directory `NAME`, old or new, and perhaps a sibling `.NAME.<pid>-<random>.partial`, half of the new one or what
    is left of the old one. Nobody needs it; the next publishing of `NAME` removes it, once the process that made it is
    gone (a lock on it tells; where directories have no locks, it stays).
    Where the file system knows no exchange, two renames take its place. Between them there is no `NAME`, and the old
    checkpoint is whole at `.NAME.<pid>-<random>.previous`: the next publishing of `NAME` puts it back first, and so
    does `mv`.

Publishers at one time
    Each has a stage of its own; the last to exchange wins, with its files all its own. On a network file system two
    machines do not see each other's locks: one may take the other's stage for abandoned, and the other then fails
    with an error, its old checkpoint whole.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bowline.checkpoint.durable.exchange import PREVIOUS, put_in_place
from bowline.checkpoint.durable.file_creation import DISK_FULL, cannot_write, copy_attributes, synchronise
from bowline.checkpoint.durable.hard_links import carry_over
from bowline.errors import CheckpointError

__all__ = ["publishing"]

_PARTIAL = ".partial"
_RACES = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY})
"""Another publisher came or went between a look and a rename."""
_ATTEMPTS = 100
PATIENCE = 1.0
"""Seconds to wait for another publisher's second rename; then the name is taken, and the old one stays where it is."""


@contextmanager
def publishing(directory: Path, replaces: Callable[[str], bool]) -> Iterator[Path]:
    """Fill the stage that this yields; on leaving, `directory` holds those files, in one atomic change.

    Kept of the old directory: every file that the new one does not bring, unless `replaces(name)` says that a file of
    this name belongs to what is replaced (a shard, an index); every subdirectory, of which `replaces` is not asked;
    links as links; owner, mode and extended attributes. A file that came by a hard or symbolic link is replaced, and
    what it leads to is not written to. The old files and the new ones stand side by side until the exchange: there
    must be room for both.

    Directories that are somebody's place
        A symbolic link to a directory stays, and the directory that it leads to is replaced. A process that stands in
        the directory is taken along when it is this one; another (a shell) stays in the old, emptied one until it
        changes into the directory anew. A mount point cannot be exchanged and is refused.

    Arguments:
        directory: the checkpoint, there or not; missing parents are made.
        replaces: whether an old file of this name goes, asked for names that the new directory does not bring.

    Raises:
        CheckpointError: not a directory, a mount point, no permission to write there or beside it, or no space. The
            old directory is as it was, and the stage is gone; so it is when anything else is raised inside.

    Example:
        >>> import tempfile
        >>> root = tempfile.TemporaryDirectory()
        >>> model = Path(root.name) / "model"
        >>> with publishing(model, replaces=lambda name: name.endswith(".bin")) as stage:
        ...     _ = (stage / "old.bin").write_bytes(b"1"), (stage / "README").write_bytes(b"2")
        >>> with publishing(model, replaces=lambda name: name.endswith(".bin")) as stage:
        ...     _ = (stage / "new.bin").write_bytes(b"3")
        >>> sorted(path.name for path in model.iterdir())
        ['README', 'new.bin']
        >>> root.cleanup()
    """
    place = Path(os.path.realpath(directory))
    with ExitStack() as undo:
        with _told(place):
            _refuse_what_cannot_be_replaced(place)
            parents = _make_parents(place, undo)
            _clear(place)
            stage = _stage(place, undo)
        try:
            yield stage
        except OSError as error:
            if error.errno in DISK_FULL:
                raise cannot_write(place, error) from error
            raise
        with _told(place):
            _publish(stage, place, replaces, undo)
            for parent in parents:
                synchronise(parent.parent)


@contextmanager
def _told(place: Path) -> Iterator[None]:
    """The system's errors, as what a person can act on."""
    try:
        yield
    except OSError as error:
        raise cannot_write(place, error) from error


def _refuse_what_cannot_be_replaced(place: Path) -> None:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        if not os.path.lexists(place):  # it is one of the parents
            raise
        raise CheckpointError(
            f"{place}: is not a directory, expected one or nothing", help="give another name, or move the file away"
        ) from error
    try:
        if os.path.ismount(place):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(place))
        if not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=descriptor):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    finally:
        os.close(descriptor)


def _make_parents(place: Path, undo: ExitStack) -> list[Path]:
    """Those that were missing, the innermost first; left empty, they go again."""
    missing = [parent for parent in place.parents if not parent.exists()]
    for parent in missing[::-1]:
        undo.callback(_remove_if_empty, parent)
        parent.mkdir(exist_ok=True)
    return missing


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


# --- the stage, and whose it is -------------------------------------------------------------------------------------


def _stage(place: Path, undo: ExitStack) -> Path:
    """A new directory beside `place`, locked as long as somebody needs it.

    Whatever has its name in the end is removed: half of a new checkpoint, or the old one.
    """
    while True:
        stage = _beside(place)
        stage.mkdir()
        undo.callback(_remove, stage)
        with suppress(FileNotFoundError, BlockingIOError):  # taken for abandoned before it was locked
            undo.callback(os.close, held := _lock(stage))
            if os.path.samestat(os.fstat(held), stage.stat()):
                break
    with suppress(FileNotFoundError):  # from now on as private as what it will replace
        status = place.stat()
        copy_attributes(status, place, stage)
        stage.chmod(status.st_mode & 0o7777 | 0o700)
    return stage


def _beside(place: Path) -> Path:
    """A name that nobody has, and that tells whoever comes later what it was."""
    return place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")


def _lock(directory: Path, *, alone: bool = False) -> int:
    """A descriptor that holds a lock, shared by all who need the directory, or `alone`, by one who will remove it.

    The lock goes with the process, however it ends. A file system without locks leaves a shared one out.

    Raises:
        BlockingIOError: who holds it does not share it.
    """
    import fcntl  # not on Windows, where no more of this file works than its import

    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if alone or isinstance(error, BlockingIOError):
            os.close(descriptor)
            raise
    return descriptor


def _clear(place: Path) -> None:
    """What publishers of `place` that were killed have left: put back if it is all there is, else removed."""
    left = re.compile(rf"\.{re.escape(place.name)}\.\d+-[0-9a-f]{{8}}\.(previous|partial)")
    for sibling in sorted(place.parent.iterdir(), reverse=True):
        if not left.fullmatch(sibling.name):
            continue
        with suppress(OSError):  # it is needed, or nobody can tell
            descriptor = _lock(sibling, alone=True)
            try:
                if sibling.suffix == PREVIOUS and not os.path.lexists(place):
                    sibling.rename(place)
                else:
                    # By another name: were it needed on another machine, which shares no locks with this one, then its
                    # publisher must find it missing, and never put half of it in place.
                    _remove(sibling.rename(_beside(place)))
            finally:
                os.close(descriptor)


def _remove(directory: Path) -> None:
    """As far as it goes: what cannot be removed now is left for the next to publish."""
    with suppress(OSError):
        for root, _, _ in os.walk(directory):
            if not os.access(root, os.W_OK | os.X_OK):
                Path(root).chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


# --- the change -----------------------------------------------------------------------------------------------------


def _publish(stage: Path, place: Path, replaces: Callable[[str], bool], undo: ExitStack) -> None:
    brought = [Path(root, name) for root, _, names in os.walk(stage) for name in names]
    for path in brought:  # what is carried over is as safe as it was
        if path.is_file() and not path.is_symlink():
            synchronise(path)
    here = _working_directory()
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            if place.is_dir():
                with suppress(BlockingIOError):
                    undo.callback(os.close, _lock(place))
                carry_over(place, stage, replaces)
                copy_attributes(place.stat(), place, stage)
            elif attempts_left and _between_renames(place):
                _clear(place)  # puts it back, if its publisher was killed there
                time.sleep(PATIENCE / _ATTEMPTS)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
            for root, _, _ in os.walk(stage):
                synchronise(Path(root))
            put_in_place(stage, place)
            break
        except OSError as error:
            if error.errno not in _RACES or not attempts_left:
                raise
    try:
        with suppress(FileNotFoundError):  # from the old one: whatever came to it since we looked
            carry_over(stage, place, replaces)
        synchronise(place.parent)
    except OSError:
        if stage.is_dir():
            put_in_place(stage, place)
        else:
            place.rename(stage)
        raise
    if here and here.is_relative_to(place):
        with suppress(OSError):
            os.chdir(here)  # else we stand in the old directory, which is about to go


def _between_renames(place: Path) -> bool:
    """Whether the checkpoint has given up its name to another publisher's, who is about to take it."""
    siblings = (path for path in place.parent.iterdir() if path.name.startswith(f".{place.name}."))
    return any(path.suffix == PREVIOUS for path in siblings)


def _working_directory() -> Path | None:
    with suppress(FileNotFoundError):
        return Path.cwd()
    return None
