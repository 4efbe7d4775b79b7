"""Publishes a checkpoint directory atomically: a reader finds the old one or the new one, even after a crash.

The new files are written into a hidden directory beside the old one. Files that they do not replace are carried over,
everything is synchronised, and then the two directories exchange their names in one step of the file system.

What a reader may see
    Through a descriptor of the directory (`os.open(directory, os.O_RDONLY)`, then `dir_fd=`): files of one checkpoint
    only. Once it is replaced, its files vanish: an open file stays readable, any other is missing, and the reader must
    start again. By path: each file is whole, and belongs to the old checkpoint or the new one; one file opened before
    the exchange and one after it belong to different ones. To be sure of one checkpoint, a reader opens the directory
    before its first file and checks after its last that the path still leads to it (`os.path.samestat`).

What a killed process leaves
    The directory `NAME`, old or new, and perhaps a sibling `.NAME.<pid>-<random>.partial` with half of the new one or
    the rest of the old one. It is not needed; the next publishing of `NAME` removes it once the process that made it
    has ended (a lock on it shows that; where directories have no locks, it stays).
    Where the file system has no exchange, two renames replace it. Between them there is no `NAME`, and the old
    checkpoint is whole at `.NAME.<pid>-<random>.previous`: the next publishing of `NAME` puts it back first, and so
    does `mv`.

Publishers at one time
    Each has its own stage; the last to exchange wins, and no files are mixed. On a network file system two machines
    do not see each other's locks: one may remove the other's stage as abandoned, and the other then fails with an
    error that leaves the old checkpoint whole.
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

__all__ = ["clear_leftovers", "locked", "publishing"]

_PARTIAL = ".partial"
_RACES = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY})
"""Error numbers that mean that another publisher changed a name between a check and a rename."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""Error numbers of a file system without locks."""
_ATTEMPTS = 100
PATIENCE = 1.0
"""Seconds to wait for another publisher's second rename. After that this one takes the name; the old one stays."""


@contextmanager
def publishing(directory: Path, replaces: Callable[[str], bool], *, new: bool = False) -> Iterator[Path]:
    """Yield an empty stage directory to fill; on leaving, its files replace those of `directory` in one atomic change.

    These stay from the old directory: every file without a new one of that name, unless `replaces(name)` says that it
    belongs to the replaced model (a shard, an index); every subdirectory, without asking `replaces`; links, as links;
    owner, mode and extended attributes. A hard or symbolic link under the name of a new file is replaced, and its
    target is not written to. The old files and the new ones exist side by side until the exchange: there must be room
    for both.

    Links, working directories and mount points
        A symbolic link to a directory stays, and the directory that it leads to is replaced. If the directory is the
        working directory of this process, it stays so after the exchange; another process (a shell) stays in the old,
        emptied one until it changes into the directory again. A mount point cannot be exchanged and is refused.

    Arguments:
        directory: the checkpoint, which need not exist; missing parents are made.
        replaces: whether to drop an old file of this name; called for names that the new directory lacks.
        new: whether the directory must not exist yet, or be empty; nothing is carried over then.

    Raises:
        CheckpointError: not a directory, one with files if it must be `new`, a mount point, no permission to write
            there or beside it, or no space. The old directory is unchanged and the stage is removed; the same holds for
            any other exception inside.

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
        with _system_errors(place):
            _refuse_what_cannot_be_replaced(place)
            if new:
                _refuse_if_filled(place)
            parents = _make_parents(place, undo)
            _clear(place)
            stage = _stage(place, undo)
        try:
            yield stage
        except OSError as error:
            if error.errno in DISK_FULL:
                raise cannot_write(place, error) from error
            raise
        with _system_errors(place):
            if new:
                _publish_new(stage, place)
            else:
                _publish(stage, place, replaces, undo)
            for parent in parents:
                synchronise(parent.parent)


@contextmanager
def _system_errors(place: Path) -> Iterator[None]:
    """Turn the system's errors into a `CheckpointError` with a way out."""
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
        if not os.path.lexists(place):  # one of the parents is a file
            raise
        raise CheckpointError(
            f"{place}: is not a directory, expected a directory or an unused name",
            help="give another name, or move the file away",
        ) from error
    try:
        if os.path.ismount(place):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(place))
        if not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=descriptor):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    finally:
        os.close(descriptor)


def _refuse_if_filled(place: Path) -> None:
    with suppress(FileNotFoundError):
        if any(place.iterdir()):
            raise CheckpointError(
                f"{place}: exists and is not empty, expected a new directory", help="give another name"
            )


def clear_leftovers(directory: Path) -> tuple[str, ...]:
    """Put back or remove what killed publishers of a directory left beside it; returns what was done, in sentences.

    Raises:
        CheckpointError: the directory that holds it cannot be read.
    """
    place = Path(os.path.realpath(directory))
    with _system_errors(place):
        return tuple(_clear(place)) if place.parent.is_dir() else ()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory's one editor; a second editor gets an error at once.

    The lock is the directory's own and ends with the process. A file system without locks grants everyone.

    Raises:
        CheckpointError: another process holds it.
    """
    place = Path(os.path.realpath(directory))
    while True:
        with _system_errors(place):
            try:
                held = _lock(place, alone=True)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"{directory}: another process is editing it", help="run again when that is done"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            current = place.is_dir() and os.path.samestat(os.fstat(held), place.stat())
        except OSError:
            current = False
        if current:  # else another editor put a new directory in its place before the lock was taken
            break
        os.close(held)
        if not os.path.lexists(place):
            raise CheckpointError(f"{directory}: no such directory", help="check the path")
    try:
        yield
    finally:
        os.close(held)


def _make_parents(place: Path, undo: ExitStack) -> list[Path]:
    """Make the missing parents and return them, innermost first; `undo` removes those that stay empty."""
    missing = [parent for parent in place.parents if not parent.exists()]
    for parent in missing[::-1]:
        undo.callback(_remove_if_empty, parent)
        parent.mkdir(exist_ok=True)
    return missing


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


# --- the stage and its lock -------------------------------------------------------------------------------------


def _stage(place: Path, undo: ExitStack) -> Path:
    """Make a new directory beside `place`, locked while this process needs it.

    The directory that has this name in the end is removed: half of a new checkpoint, or the old one.
    """
    while True:
        stage = _beside(place)
        stage.mkdir()
        undo.callback(_remove, stage)
        with suppress(FileNotFoundError, BlockingIOError):  # another publisher removed it before it was locked
            undo.callback(os.close, held := _lock(stage))
            if os.path.samestat(os.fstat(held), stage.stat()):
                break
    with suppress(FileNotFoundError):  # as private as the directory that it will replace
        status = place.stat()
        copy_attributes(status, place, stage)
        stage.chmod(status.st_mode & 0o7777 | 0o700)
    return stage


def _beside(place: Path) -> Path:
    """An unused name beside `place`, by which later publishers recognise it as a stage."""
    return place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")


def _lock(directory: Path, *, alone: bool = False) -> int:
    """Lock a directory and return the descriptor: shared by all that need it, or `alone` by the one that removes it.

    The lock ends with the process, however that ends. On a file system without locks, a shared one is omitted.

    Raises:
        BlockingIOError: another process holds a lock that excludes this one.
    """
    import fcntl  # missing on Windows, where this module can be imported but not used

    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if alone or isinstance(error, BlockingIOError):
            os.close(descriptor)
            raise
    return descriptor


def _clear(place: Path) -> list[str]:
    """Put back or remove what killed publishers left: an old checkpoint goes back if `place` is missing."""
    done: list[str] = []
    left = re.compile(rf"\.{re.escape(place.name)}\.\d+-[0-9a-f]{{8}}\.(previous|partial)")
    for sibling in sorted(place.parent.iterdir(), reverse=True):
        if not left.fullmatch(sibling.name):
            continue
        with suppress(OSError):  # in use, or the lock cannot show whether it is
            descriptor = _lock(sibling, alone=True)
            try:
                if sibling.suffix == PREVIOUS and not os.path.lexists(place):
                    sibling.rename(place)
                    done.append(f"put back {place.name}, which a stopped process had moved to {sibling.name}")
                else:
                    # Renamed first: if a publisher on another machine, which shares no locks with this one, still needs
                    # it, it must find it missing, and never put half of it in place.
                    _remove(sibling.rename(_beside(place)))
                    done.append(f"removed {sibling.name}, which a stopped process had left")
            finally:
                os.close(descriptor)
    return done


def _remove(directory: Path) -> None:
    """Remove a directory as far as possible; the next publisher removes the rest."""
    with suppress(OSError):
        for root, _, _ in os.walk(directory):
            if not os.access(root, os.W_OK | os.X_OK):
                Path(root).chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


# --- the change -----------------------------------------------------------------------------------------------------


def _publish_new(stage: Path, place: Path) -> None:
    """Give the stage its name, which no other directory with files may have."""
    for root, _, names in os.walk(stage):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                synchronise(path)
        synchronise(Path(root))
    try:
        stage.rename(place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CheckpointError(
                f"{place}: exists by now: another process made it meanwhile", help="give another name"
            ) from error
        raise
    synchronise(place.parent)


def _publish(stage: Path, place: Path, replaces: Callable[[str], bool], undo: ExitStack) -> None:
    brought = [Path(root, name) for root, _, names in os.walk(stage) for name in names]
    for path in brought:  # files that are carried over are on disk already
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
                _clear(place)  # puts it back if its publisher was killed there
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
        with suppress(FileNotFoundError):  # files that were added to the old directory meanwhile
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
            os.chdir(here)  # the old directory is about to be removed


def _between_renames(place: Path) -> bool:
    """Whether another publisher is between its two renames, so that `place` is missing for a moment."""
    siblings = (path for path in place.parent.iterdir() if path.name.startswith(f".{place.name}."))
    return any(path.suffix == PREVIOUS for path in siblings)


def _working_directory() -> Path | None:
    with suppress(FileNotFoundError):
        return Path.cwd()
    return None
