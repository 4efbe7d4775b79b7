"""Time limits of requests, and the deadline that ends a request as a whole."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

__all__ = ["Deadline", "Patience"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The limits on waiting for the Hub, in seconds, and the number of attempts.

    `connect` and `read` limit a single silence. A request of n bytes as a whole, redirects included, may take
    `deadline + n / slowest`: a server that sends a byte now and then never exceeds the other two. After a
    temporary failure, the next attempt waits `backoff`, twice that, and so on, or as long as `Retry-After` says, and
    never longer than `longest_wait`.
    """

    connect: float = 10.0
    read: float = 30.0
    deadline: float = 60.0
    slowest: float = 64 * 1024.0
    attempts: int = 5
    backoff: float = 1.0
    longest_wait: float = 60.0
    sleep: Callable[[float], None] = time.sleep


class Deadline:
    """Ends a request after `seconds` by shutting its sockets, since every byte restarts a read timeout.

    `trace` receives the sockets from the HTTP client; `sockets` outlives the request, as keep-alive sockets do.
    """

    def __init__(self, seconds: float, sockets: list[socket.socket]) -> None:
        self.passed = False
        self._over = False
        self._sockets = sockets
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Callback of the HTTP client, which keeps the sockets that the client opens."""
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        opened = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._sockets[:] = [known for known in self._sockets if known.fileno() >= 0]
            self._sockets.append(opened)
            if self.passed:
                self._shut(opened)

    def _end(self) -> None:
        with self._lock:
            if self._over:
                return
            self.passed = True
            for each in self._sockets:
                self._shut(each)

    @staticmethod
    def _shut(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(each, socket.SHUT_RDWR)  # a TLS socket too, without TLS's closing message

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()
