"""Shows a progress bar if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bowline.auditing.progress import Progress
from bowline.wording import printable

__all__ = ["shown_progress"]

WORTH_A_BAR = 256 << 20
"""Number of bytes from which reading takes long enough for a bar."""


@contextmanager
def shown_progress(title: str) -> Iterator[Progress]:
    """Show a bar on stderr if it is a terminal and at least `WORTH_A_BAR` bytes are to be read."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: closed by whoever started us
        yield Progress()
        return
    bar = _Bar(title)
    try:
        yield bar
    finally:
        bar.stop()


class _Bar(Progress):
    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task(printable(title), total=None)

    def expect(self, count: int) -> None:
        self._bars.update(self._task, total=count)
        if count >= WORTH_A_BAR:
            self._bars.start()

    def advance(self, count: int) -> None:
        self._bars.advance(self._task, count)

    def stop(self) -> None:
        self._bars.stop()
