"""Publishes a new file, and files that belong to it, once all are complete: a reader never finds a part of one."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bowline.checkpoint.durable.file_creation import cannot_write, synchronise
from bowline.errors import CheckpointError

__all__ = ["publishing_files"]

_NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Error numbers of a file system without hard links."""


@contextmanager
def publishing_files(file: Path) -> Iterator[Path]:
    """Yield an empty stage directory to fill; on leaving, its files appear beside `file`, and `file` itself last.

    The stage is a hidden directory beside `file`. `clear_leftovers(file)` removes that of a killed process.

    Raises:
        CheckpointError: one of the names is taken, or cannot be written. Nothing has a new name then; the same holds
            for any other exception inside.

    Example:
        >>> import tempfile
        >>> root = tempfile.TemporaryDirectory()
        >>> with publishing_files(Path(root.name) / "model.gguf") as stage:
        ...     _ = (stage / "model.gguf").write_bytes(b"1"), (stage / "model.token_map.json").write_bytes(b"{}")
        >>> sorted(path.name for path in Path(root.name).iterdir())
        ['model.gguf', 'model.token_map.json']
        >>> root.cleanup()
    """
    with ExitStack() as undo:
        try:
            _refuse_taken(file)
            file.parent.mkdir(parents=True, exist_ok=True)
            stage = _stage(file, undo)
        except OSError as error:
            raise cannot_write(file, error) from error
        yield stage
        try:
            _publish(stage, file)
        except OSError as error:
            raise cannot_write(file, error) from error


def _refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(f"{path}: exists, expected a new file", help="give another name")


def _stage(file: Path, undo: ExitStack) -> Path:
    """A new directory beside the file, locked while it is needed, under a name that `clear_leftovers` knows."""
    import fcntl  # missing on Windows, where this module can be imported but not used

    while True:
        stage = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        stage.mkdir()
        undo.callback(shutil.rmtree, stage, ignore_errors=True)
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            held = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, held)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), stage.stat()):
                return stage


def _publish(stage: Path, file: Path) -> None:
    staged = sorted(stage.iterdir(), key=lambda path: (path.name == file.name, path.name))
    for path in staged:
        synchronise(path)
    published: list[Path] = []
    try:
        for path in staged:
            target = file.with_name(path.name)
            _refuse_taken(target)
            try:
                os.link(path, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                path.rename(target)
            published.append(target)
        synchronise(file.parent)
    except BaseException:
        for target in published:
            target.unlink(missing_ok=True)
        raise
