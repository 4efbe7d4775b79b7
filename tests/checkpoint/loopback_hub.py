"""A Hub on 127.0.0.1: the model API and `resolve`, with the large files on a second origin as on a CDN.

What it does wrong, it does on request: `faults["api"]`, `faults["resolve"]` and `faults["cdn"]` are iterators, and
each request takes the next fault of its kind, until there is none and the answer is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

__all__ = ["Answer", "Fault", "LoopbackHub", "Request", "commit_of"]


def commit_of(label: str) -> str:
    return hashlib.sha1(label.encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    kind: str  # "api", "resolve" or "cdn"
    path: str
    headers: dict[str, str]  # by lower-case name
    client: tuple[str, int]  # one port, one connection


class Answer:
    """The answer to one range request: what is right, and the means to send something else."""

    def __init__(self, handler: _Handler, kind: str, body: bytes, total: int, start: int) -> None:
        self.handler = handler
        self.hub = handler.server.hub
        self.kind = kind
        self.body = body
        self.total = total
        self.start = start

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.start + len(self.body) - 1}/{self.total}"

    def send(self, status: int = 206, body: bytes | None = None, headers: dict[str, str | None] | None = None) -> None:
        body = self.body if body is None else body
        all_headers: dict[str, str | None] = {"Content-Length": str(len(body)), "Content-Range": self.content_range}
        if status != 206:
            del all_headers["Content-Range"]
        all_headers |= headers or {}
        self.handler.send_response(status)
        for name, value in all_headers.items():
            if value is not None:
                self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def reset(self) -> None:
        """End the connection without a farewell."""
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.handler.connection.close()
        self.handler.close_connection = True

    def wait_for_the_end(self) -> None:
        self.hub.ending.wait(30)
        self.handler.close_connection = True

    def drip(self, data: Iterator[bytes]) -> None:
        """A byte now and then: often enough for a read timeout, never enough to be done."""
        for byte in data:
            self.handler.wfile.write(byte)
            self.hub.dripped += 1
            if self.hub.ending.wait(0.02):
                break
        self.handler.close_connection = True


Fault = Callable[[Answer], None]


@dataclass
class LoopbackHub:
    """`branches` name commits, `commits` hold files; files named in `stored_apart` are redirected to the CDN."""

    repository: str = "org/name"
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    stored_apart: frozenset[str] = frozenset()
    listing: Callable[[dict[str, Any]], object] = lambda listing: listing
    faults: dict[str, Iterator[Fault]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    dripped: int = 0
    sent: int = 0

    def __enter__(self) -> Self:
        self.ending = threading.Event()
        self.servers = {kind: _Server(self, kind) for kind in ("hub", "cdn")}
        for server in self.servers.values():
            server.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        for server in self.servers.values():
            server.shutdown()
            server.hang_up()
            server.thread.join()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return self.servers["hub"].address

    @property
    def cdn(self) -> str:
        return self.servers["cdn"].address

    def of_kind(self, kind: str) -> list[Request]:
        return [request for request in self.requests if request.kind == kind]

    def as_listing(self, commit: str) -> object:
        siblings = []
        for name, data in self.commits[commit].items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name in self.stored_apart:
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return self.listing({"id": self.repository, "modelId": self.repository, "sha": commit, "siblings": siblings})


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` waits for them, so no socket outlives its test

    def __init__(self, hub: LoopbackHub, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.kind = kind
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.003})
        self.connections: set[socket.socket] = set()

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass

    def do_GET(self) -> None:
        hub, parts = self.server.hub, urlsplit(self.path)
        api = re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", parts.path)
        file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", parts.path)
        kind = "cdn" if self.server.kind == "cdn" else "api" if api else "resolve"
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(Request(kind, self.path, headers, self.client_address))
        fault = next(hub.faults.get(kind, iter(())), None)
        if api:
            self.answer_listing(api[1], unquote(api[2] or "main"), parse_qs(parts.query), fault)
        elif file and file[1] == hub.repository:
            self.answer_range(unquote(file[2]), unquote(file[3]), kind, fault)
        else:
            self.answer_error(404, "RepoNotFound", fault)

    def answer_error(self, status: int, code: str, fault: Fault | None) -> None:
        answer = Answer(self, "error", b"", 0, 0)
        if fault:
            fault(answer)
        else:
            answer.send(status, headers={"X-Error-Code": code})

    def answer_listing(self, repository: str, revision: str, query: dict[str, list[str]], fault: Fault | None) -> None:
        hub = self.server.hub
        commit = hub.branches.get(revision, revision)
        if repository != hub.repository:
            self.answer_error(401 if "Authorization" not in self.headers else 404, "RepoNotFound", fault)
        elif commit not in hub.commits:
            self.answer_error(404, "RevisionNotFound", fault)
        else:
            listing = hub.as_listing(commit)
            if query.get("blobs") != ["true"] and isinstance(listing, dict):
                listing["siblings"] = [{"rfilename": each["rfilename"]} for each in listing["siblings"]]
            body = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
            answer = Answer(self, "api", body, len(body), 0)
            if fault:
                fault(answer)
            else:
                answer.send(200)

    def answer_range(self, revision: str, name: str, kind: str, fault: Fault | None) -> None:
        hub = self.server.hub
        files = hub.commits.get(hub.branches.get(revision, revision), {})
        if name not in files:
            self.answer_error(404, "EntryNotFound", fault)
            return
        data = files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
        answer = Answer(self, kind, data[start:end], len(data), start)
        if fault:
            fault(answer)
        elif kind == "resolve" and name in hub.stored_apart:
            signed = f"{hub.cdn}/{hub.repository}/resolve/{revision}/{quote(name)}?Signature=secret"
            answer.send(302, b"Found. Redirecting to the storage", {"Location": signed})
        else:
            hub.sent += len(answer.body)
            answer.send(206 if asked else 200)
