"""Sends requests to one endpoint with its token, and repeats them if that can help."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import ssl
from collections.abc import Iterator

from bowline.checkpoint.places.hub.access_token import Secret
from bowline.checkpoint.places.hub.connection import Connection
from bowline.checkpoint.places.hub.request_failure import Accept, RequestFailure
from bowline.checkpoint.places.hub.time_limits import Patience

__all__ = ["Client"]


class Client:
    """Sends requests to one endpoint, from any number of threads, on as many connections as are in use."""

    def __init__(self, endpoint: str, secret: Secret, patience: Patience) -> None:
        self.endpoint = endpoint
        self._secret = secret
        self._patience = patience
        self._idle: list[Connection] = []
        self._closed = False
        self._answered = False
        self._trust: ssl.SSLContext | None = None

    def get(
        self, path: str, *, accept: Accept, headers: dict[str, str] | None = None, seconds_for: int = 0
    ) -> RequestFailure | None:
        """GET `path` until `accept` takes the answer; returns the last failure. `seconds_for` bytes extend the time."""
        patience = self._patience
        seconds = patience.deadline + seconds_for / patience.slowest
        attempt = 0
        while not self._closed:
            attempt += 1
            with self._connection() as connection:
                failure = connection.get(f"{self.endpoint}/{path}", headers or {}, seconds, accept)
            self._answered |= not (failure and failure.unreached)
            if failure is None:
                return None
            failure = dataclasses.replace(failure, said=self._secret.struck_from(failure.said))
            if not failure.passing:
                return failure
            # If the Hub never answered, the network is most likely missing: fail soon.
            most = patience.attempts if self._answered else min(patience.attempts, 2)
            if attempt >= most:
                return dataclasses.replace(failure, said=f"{failure.said} (attempts: {attempt})")
            wait = patience.backoff * 2.0 ** (attempt - 1) if failure.wait is None else failure.wait
            # Many readers that failed at once must not all retry at once.
            patience.sleep(min(wait * random.uniform(1.0, 1.25), patience.longest_wait))
        return RequestFailure(said="a file was read after the repository was closed", help="open it again")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        # One connection serves one request at a time, and then the next file's: readers one after another share it.
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self.endpoint, self._secret, self._patience, self._certificates)
        try:
            yield connection
        except BaseException:  # interrupted: an answer may still be under way
            connection.close()
            raise
        self._idle.append(connection)
        if self._closed:
            self.close()

    def _certificates(self) -> ssl.SSLContext:
        import httpx2

        if self._trust is None:  # read once: there are hundreds of them
            self._trust = httpx2.create_ssl_context()
        return self._trust

    def close(self) -> None:
        """Close the connections; every later request fails."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
