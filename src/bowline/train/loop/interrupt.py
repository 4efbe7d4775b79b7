"""Ctrl-C and SIGTERM: the first signal ends the loop after the current step, the second one at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupt"]


class Interrupt:
    """A context in which the first signal is only recorded in `seen`, and the second raises `KeyboardInterrupt`.

    In a thread other than the main one it does nothing, because only the main thread receives signals.
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
