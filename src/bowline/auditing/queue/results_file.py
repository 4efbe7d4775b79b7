"""A file of results, one JSON object a line, to which a later run adds what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bowline.errors import UsageError

__all__ = ["ResultsFile"]


class ResultsFile:
    """The results in `file`, of which each line has the place's `path`; `done` has the exit code of each.

    A last line that is not whole, as a run that was killed leaves it, is removed. Only one run at a time can have it.

    Raises:
        UsageError: the file cannot be written, holds something else, or another run has it.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        try:
            self._file: IO[bytes] = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b")
        except OSError as error:
            raise UsageError(
                f"{file}: cannot be written: {error.strerror or error}", help="give another --output-file"
            ) from None
        try:
            self._lock()
            self.done: Mapping[str, int] = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, line: str) -> None:
        """Write a line at the end, at once.

        Raises:
            UsageError: there is no room.
        """
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be written: {error.strerror or error}",
                help="free space; the same command continues with what is missing",
            ) from None

    def _lock(self) -> None:
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path}: another run is writing to it", help="wait until it ends, or give another --output-file"
            ) from None

    def _read(self) -> dict[str, int]:
        done, whole = dict[str, int](), 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("path"), str):
                raise UsageError(
                    f"{self.path}: line {number} is not the result of an audit, expected a JSON object with its path",
                    help="give a new --output-file",
                )
            done[record["path"]] = _code(record)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(whole)
        return done


def _code(record: Mapping[str, Any]) -> int:
    """The exit code of the audit that a line records."""
    if record.get("failures"):
        return 2
    reports = [*record.get("checkpoints", ()), *record.get("adapters", ())]
    return int(any(finding["severity"] != "info" for report in reports for finding in report["findings"]))
