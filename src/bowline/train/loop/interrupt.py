"""Ctrl-C and SIGTERM: asked for once, the loop ends behind a whole step; asked for twice, at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupt"]


class Interrupt:
    """While this lasts, the first signal is kept in `seen`, and the second is a `KeyboardInterrupt`.

    Signals belong to the main thread: in another one nothing changes.
    """

    def __init__(self) -> None:
        self.seen: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen is not None:
            raise KeyboardInterrupt
        self.seen = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
