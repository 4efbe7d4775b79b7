"""A model on the Hugging Face Hub, read where it lies: exact byte ranges of one commit, nothing kept on disk.

One request lists the repository and pins its commit; every later request names that commit, so a branch that moves
meanwhile cannot mix two models. Of a file, only the ranges that are asked for are transferred. The listing is asked
for here and not through `HfApi.model_info`, which has no limit on its time, and which looks up and stores on disk
which program is calling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import ipaddress
import json
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from bowline.checkpoint.fileset import FileSet
from bowline.checkpoint.source import ByteSource
from bowline.errors import CheckpointError, NoCheckpointError, RemoteError, UsageError

if TYPE_CHECKING:
    import httpx2

__all__ = ["HubRepository", "Patience", "RemoteFile"]

LARGEST_REQUEST = 16 << 20
"""One range request asks for no more than this: what a retry has to fetch again."""

READ_AHEAD = 128 << 10
"""The first small read near a file's start fetches this much: a safetensors length and its header are one request."""

LARGEST_LISTING = 64 << 20
MOST_REDIRECTS = 5
SMALL_BODY = 16 << 10

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_BAD_REVISION = re.compile(r"[\s~^:?*\[\\@]|\.\.|//|^[-/.]|[/.]$|\.lock$")

_NO_NETWORK = "check the network, the proxy and HF_ENDPOINT, or give a local directory"
_TRY_LATER = "try again later, or give a local directory"
_BAD_SERVER = "check HF_ENDPOINT and the proxy; a local directory does without them"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for the Hub, in seconds, and how often to ask again.

    `connect` and `read` bound a single silence. A request of n bytes as a whole, redirects included, may take
    `deadline + n / slowest`: a server that drips a byte now and then never trips the other two. After a failure
    that may pass, the next attempt waits `backoff`, twice that, and so on, or as long as `Retry-After` says, and
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


class HubRepository(FileSet):
    """A model repository at one commit: `sizes()` as listed, each file as a `RemoteFile`.

    `repository` is `org/name`, `commit` the full hash, `location` the two together with the hash cut to 12 digits.
    Files whose names cannot be trusted as relative paths (`..`, a leading `/`, a backslash, control characters)
    are left out of `sizes()`.

    Example:
        >>> with HubRepository.open_repository("openai-community/gpt2") as files:  # doctest: +SKIP
        ...     config = files.read("config.json")
    """

    parallel_reads = 8

    def __init__(self, hub: _Hub, repository: str, commit: str, sizes: Mapping[str, int]) -> None:
        self.repository = repository
        self.commit = commit
        self.location = f"{repository}@{commit[:12]}"
        self._hub = hub
        self._sizes = MappingProxyType(dict(sorted(sizes.items())))

    @classmethod
    def open_repository(
        cls,
        name: str,
        *,
        endpoint: str | None = None,
        token: str | bool | None = None,
        patience: Patience | None = None,
    ) -> Self:
        """List `org/name`, `org/name@revision` or `name`, and pin the commit that the revision is at now.

        `endpoint` and `token` default to what `huggingface_hub` would use: `HF_ENDPOINT`, and `HF_TOKEN` or the
        stored login. `token=False` sends none. The token goes to the endpoint only, and into no message.

        Raises:
            UsageError: the name, the revision or the endpoint cannot be one.
            NoCheckpointError: there is no such repository or revision, or no access to it.
            RemoteError: the Hub could not be reached, or its answer is not a listing.
        """
        secret = _Secret(token)
        del token  # so that no traceback that shows local variables shows it
        repository, revision = _parse_name(name)
        address = _parse_endpoint(endpoint)
        _refuse_offline(name)  # before a stored login may be renewed, which takes a request
        hub = _Hub(address, secret.resolved(), patience or Patience())
        try:
            commit, sizes = hub.listing(repository, revision)
        except BaseException:
            hub.close()
            raise
        return cls(hub, repository, commit, sizes)

    def sizes(self) -> Mapping[str, int]:
        """Every file's size in bytes, by name, as the Hub lists them for this commit."""
        return self._sizes

    def open(self, name: str) -> RemoteFile:
        """The file as random access; nothing is requested before the first read.

        Raises:
            CheckpointError: the listing has no such file.
        """
        if name not in self._sizes:
            raise CheckpointError(
                f"{self.location}: there is no file {_shown(name)}, expected one of the {len(self._sizes)} listed",
                help="the repository is incomplete, or its index names a file that was never uploaded",
            )
        path = f"{self.repository}/resolve/{self.commit}/{quote(name)}"
        return RemoteFile(self._hub, self.location, name, path, self._sizes[name])

    def way_out(self, name: str) -> str | None:
        """How `name` would leave the repository (a phrase for a message), or `None` when it stays inside."""
        return None if _is_plain_path(name) else "is not a path inside the repository"

    def close(self) -> None:
        """Let go of the connections; reads from files still open are errors."""
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HubRepository({self.location!r})"


class RemoteFile(ByteSource):
    """A file of a `HubRepository`: every read is the exact range or a `RemoteError`.

    A server's answer is accepted when it is `206` with the `Content-Range` that was asked for, the listed size as
    its total, no content encoding, and a body of just that length. A plain `200` is accepted for a range that is
    the whole file, where it says the same; anywhere else it is refused before its body is read.

    Safe to read from several threads; each has its own connection then.
    """

    def __init__(self, hub: _Hub, location: str, name: str, path: str, size: int) -> None:
        self.name = name
        self.size = size
        self._hub = hub
        self._location = location
        self._path = path
        self._start = b""
        self._closed = False

    def _fill(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise RemoteError(f"{self._location}: {self.name}: read after it was closed", help="open it again")
        ahead = min(READ_AHEAD, self.size)
        if not self._start and offset + len(buffer) <= ahead:
            start = bytearray(ahead)
            self._fetch(0, memoryview(start))
            self._start = bytes(start)
        done = 0
        if offset < len(self._start):
            known = self._start[offset : offset + len(buffer)]
            buffer[: len(known)] = known
            done = len(known)
        while done < len(buffer):
            piece = buffer[done : done + LARGEST_REQUEST]
            self._fetch(offset + done, piece)
            done += len(piece)

    def _fetch(self, offset: int, buffer: memoryview) -> None:
        asked = _Range(offset, len(buffer), self.size)
        failure = self._hub.get(
            self._path, headers={"Range": asked.header}, seconds_for=len(buffer), accept=asked.receive_into(buffer)
        )
        if failure:
            raise self._hub.error(f"{self._location}: {self.name}: bytes {asked}", failure, RemoteError)

    def close(self) -> None:
        """Let go of what was read ahead; the connection stays with the repository, for its next file."""
        self._closed = True
        self._start = b""

    def __repr__(self) -> str:
        return f"RemoteFile({self.name!r}, {self.size} bytes, {self._location!r})"


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why an attempt gave nothing. A value, not an exception: what it comes from holds headers, and so the token."""

    said: str
    help: str
    passing: bool = False  # another attempt may succeed
    wait: float | None = None  # as the server asked
    unreached: bool = False
    absent: bool = False


@dataclass(frozen=True)
class _Range:
    """Bytes `offset` to `offset + length` of a file of `total`."""

    offset: int
    length: int
    total: int

    def __str__(self) -> str:
        return f"{self.offset}-{self.offset + self.length - 1}"

    @property
    def header(self) -> str:
        return f"bytes={self}"

    def receive_into(self, buffer: memoryview) -> Callable[[httpx2.Response], _Failure | None]:
        def receive(response: httpx2.Response) -> _Failure | None:
            return self._refusal(response) or self._receive(response, buffer)

        return receive

    def _refusal(self, response: httpx2.Response) -> _Failure | None:
        host, headers = response.url.host, response.headers
        whole = self.length == self.total
        if response.status_code != 206 and not (whole and response.status_code == 200):
            ignored = ": it ignores ranges and would send the whole file" if response.status_code == 200 else ""
            return _Failure(said=f"{host} answered {response.status_code}, expected 206{ignored}", help=_BAD_SERVER)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            return _Failure(
                said=f"{host} answered with content encoding {_quoted(encoding)}, expected the bytes themselves",
                help=_BAD_SERVER,
            )
        if headers.get("content-type", "").strip().lower().startswith("multipart/"):
            return _Failure(said=f"{host} answered with several parts, expected one range", help=_BAD_SERVER)
        if response.status_code == 206:
            given = headers.get("content-range", "")
            match = _CONTENT_RANGE.fullmatch(given.strip())
            if match and int(match[3]) != self.total:
                return _Failure(
                    said=f"the file has {int(match[3])} bytes at {host}, expected {self.total} as the Hub lists it",
                    help="the listing and the storage disagree; report it to the repository's owner",
                )
            if not match or (int(match[1]), int(match[2])) != (self.offset, self.offset + self.length - 1):
                return _Failure(
                    said=f"{host} answered with Content-Range {_quoted(given)}, expected 'bytes {self}/{self.total}'",
                    help=_BAD_SERVER,
                )
        length = headers.get("content-length")
        if length is not None and length.strip() != str(self.length):
            return _Failure(
                said=f"{host} announced a body of {_quoted(length)} bytes, expected {self.length}", help=_BAD_SERVER
            )
        return None

    def _receive(self, response: httpx2.Response, buffer: memoryview) -> _Failure | None:
        done = 0
        for chunk in response.iter_raw():
            if done + len(chunk) > self.length:
                return _Failure(said=f"{response.url.host} sent more than {self.length} bytes", help=_BAD_SERVER)
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)
        if done < self.length:
            return _Failure(
                said=f"{response.url.host} sent {done} bytes, expected {self.length}", help=_TRY_LATER, passing=True
            )
        return None


class _Secret:
    """A token that shows itself nowhere but in the `Authorization` header."""

    __slots__ = ("_given",)

    def __init__(self, given: str | bool | None) -> None:
        self._given = given

    def resolved(self) -> _Secret:
        """The token that `huggingface_hub` would send, which knows of logins, files and environment variables."""
        if isinstance(self._given, str) or self._given is False:
            return self
        from huggingface_hub import constants, get_token

        if self._given is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return _Secret(False)
        trouble = ""
        try:
            found = _Secret(get_token())
        except Exception as error:
            trouble = type(error).__name__  # its text may quote the token
        if trouble:
            raise RemoteError(
                f"the stored Hugging Face token could not be read ({trouble})", help="log in again with `hf auth login`"
            )
        if self._given is True and not found:
            raise UsageError("token=True, but no Hugging Face token is stored", help="log in with `hf auth login`")
        return found

    def __bool__(self) -> bool:
        return isinstance(self._given, str) and self._given != ""

    def header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._given}"} if self else {}

    def struck_from(self, text: str) -> str:
        """`text` without the token, should a server have echoed it (in lower case, where it made it a host)."""
        token = str(self._given)
        if len(token) < 8:  # no token of the Hub's, and would be found in every other word
            return text
        return re.sub(re.escape(token), "[token]", text, flags=re.IGNORECASE)

    def __repr__(self) -> str:
        return "<token>" if self else "<no token>"


class _Hub:
    """An endpoint with its token: asks, and asks again where that helps."""

    def __init__(self, endpoint: str, secret: _Secret, patience: Patience) -> None:
        self.endpoint = endpoint
        self._secret = secret
        self._patience = patience
        self._idle: list[_Connection] = []
        self._closed = False
        self._answered = False
        self._trust: ssl.SSLContext | None = None

    def listing(self, repository: str, revision: str | None) -> tuple[str, dict[str, int]]:
        """The commit that `revision` is at, and the sizes of its files."""
        name = f"{repository}@{revision}" if revision else repository
        body = bytearray()

        def receive(response: httpx2.Response) -> _Failure | None:
            if response.status_code != 200:
                return _Failure(said=f"{response.url.host} answered {response.status_code}", help=_BAD_SERVER)
            body.clear()
            for chunk in response.iter_bytes():
                body.extend(chunk)
                if len(body) > LARGEST_LISTING:
                    return _Failure(said=f"the listing is larger than {LARGEST_LISTING} bytes", help=_BAD_SERVER)
            return None

        at = f"/revision/{quote(revision, safe='')}" if revision else ""
        failure = self.get(f"api/models/{repository}{at}?blobs=true", headers={}, seconds_for=0, accept=receive)
        if failure:
            raise self.error(name, failure, NoCheckpointError if failure.absent else RemoteError)
        commit, sizes, problem = _parse_listing(bytes(body))
        if not problem and revision and _COMMIT.fullmatch(revision) and commit != revision:
            problem = f"it is for commit {commit}"
        if problem:
            said = self._secret.struck_from(
                f"{urlsplit(self.endpoint).hostname} did not answer with a listing: {problem}"
            )
            raise RemoteError(f"{name}: {said}", help=_BAD_SERVER)
        return commit, sizes

    def get(
        self,
        path: str,
        *,
        headers: dict[str, str],
        seconds_for: int,
        accept: Callable[[httpx2.Response], _Failure | None],
    ) -> _Failure | None:
        """GET `path` until `accept` takes the answer; otherwise, the last failure."""
        patience = self._patience
        seconds = patience.deadline + seconds_for / patience.slowest
        attempt = 0
        while True:
            attempt += 1
            with self._connection() as connection:
                if connection is None:
                    return _Failure(said="read after the repository was closed", help="open it again")
                failure = self._struck(connection.get(f"{self.endpoint}/{path}", headers, seconds, accept))
            self._answered |= not (failure and failure.unreached)
            if failure is None or not failure.passing:
                return failure
            # A Hub that never answered is most likely a missing network: say so soon.
            most = patience.attempts if self._answered else min(patience.attempts, 2)
            if attempt >= most:
                return dataclasses.replace(failure, said=f"{failure.said} (attempts: {attempt})")
            wait = patience.backoff * 2.0 ** (attempt - 1) if failure.wait is None else failure.wait
            # Many readers that failed together must not come back together.
            patience.sleep(min(wait * random.uniform(1.0, 1.25), patience.longest_wait))

    def error(self, where: str, failure: _Failure, kind: type[CheckpointError]) -> CheckpointError:
        """What to raise, outside any `except`: a chained exception would hold the request with its token."""
        return kind(f"{where}: {failure.said}", help=failure.help)

    def _struck(self, failure: _Failure | None) -> _Failure | None:
        return failure and dataclasses.replace(failure, said=self._secret.struck_from(failure.said))

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_Connection | None]:
        # One connection serves one request at a time, and then the next file's: readers one after another share it.
        if self._closed:
            yield None
            return
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self.endpoint, self._secret, self._patience, self._certificates)
        try:
            yield connection
        except BaseException:  # interrupted: who knows what is still under way
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
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


class _Connection:
    """One keep-alive client, used for one request at a time."""

    def __init__(
        self, endpoint: str, secret: _Secret, patience: Patience, certificates: Callable[[], ssl.SSLContext]
    ) -> None:
        self._endpoint = endpoint
        self._certificates = certificates
        self._secret = secret
        self._patience = patience
        self._client: httpx2.Client | None = None
        self._sockets: list[socket.socket] = []
        self._host = urlsplit(endpoint).hostname or endpoint

    def get(
        self,
        url: str,
        headers: dict[str, str],
        seconds: float,
        accept: Callable[[httpx2.Response], _Failure | None],
    ) -> _Failure | None:
        """One attempt, redirects included. No exception of the HTTP client leaves it."""
        import httpx2

        if self._client is None:
            try:
                self._client = httpx2.Client(
                    headers={"User-Agent": _user_agent(), "Accept-Encoding": "identity"}, verify=self._certificates()
                )
            except (ImportError, OSError, ValueError) as error:  # a proxy's address may hold a password: not quoted
                return _Failure(
                    said=f"no HTTP client could be set up ({type(error).__name__})",
                    help="check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
                )
        deadline = _Deadline(seconds, self._sockets)
        try:
            with deadline:
                failure = self._follow(httpx2.URL(url), headers, deadline, accept)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            failure = self._broken(error)
        if deadline.passed:
            return _Failure(
                said=f"{self._host} was still answering after {seconds:.3g} s, expected it to be done", help=_TRY_LATER
            )
        return failure

    def _follow(
        self,
        url: httpx2.URL,
        headers: dict[str, str],
        deadline: _Deadline,
        accept: Callable[[httpx2.Response], _Failure | None],
    ) -> _Failure | None:
        import httpx2

        assert self._client is not None
        timeout = httpx2.Timeout(self._patience.read, connect=self._patience.connect)
        trusted = True
        for _ in range(MOST_REDIRECTS + 1):
            # The storage that the Hub sends us to has no business with the token, nor has anyone it sends us back to.
            trusted = trusted and _origin(url) == _origin(httpx2.URL(self._endpoint))
            self._host = url.host
            request = self._client.build_request(
                "GET",
                url,
                headers=httpx2.Headers(headers | (self._secret.header() if trusted else {})),
                timeout=timeout,
                extensions={"trace": deadline.trace},
            )
            response = self._client.send(request, stream=True, follow_redirects=False)
            with contextlib.closing(response):
                if response.status_code not in _REDIRECTS:
                    return self._denial(response, trusted) or accept(response)
                target = _redirect(url, response)
                if isinstance(target, _Failure):
                    return target
                if response.headers.get("content-length", "").isdecimal() and (
                    int(response.headers["content-length"]) <= SMALL_BODY
                ):
                    for _chunk in response.iter_raw():  # read to its end, the connection can be used again
                        pass
                url = target
        return _Failure(said=f"redirected more than {MOST_REDIRECTS} times, last by {self._host}", help=_BAD_SERVER)

    def _denial(self, response: httpx2.Response, trusted: bool) -> _Failure | None:
        """What an error status means; `None` when the status is for the caller to judge."""
        status, headers = response.status_code, response.headers
        if status == 429:
            return _Failure(
                said=f"{self._host} answered 429: too many requests",
                help="wait some minutes; who is logged in (`hf auth login`) is allowed more",
                passing=True,
                wait=_retry_after(headers),
            )
        if status == 408 or status >= 500:
            return _Failure(
                said=f"{self._host} answered {status}", help=_TRY_LATER, passing=True, wait=_retry_after(headers)
            )
        if status == 416:
            return _Failure(
                said=f"{self._host} answered 416: the file ends before these bytes",
                help="the listing and the storage disagree; report it to the repository's owner",
            )
        if not trusted or status not in (401, 403, 404):
            return None
        code = headers.get("x-error-code", "")
        if code == "GatedRepo":
            return _Failure(
                said=f"the repository is gated, and no access was granted ({status})",
                help="accept its terms on its web page, then log in with `hf auth login`",
                absent=True,
            )
        if code == "RevisionNotFound":
            return _Failure(
                said="the repository has no such revision",
                help="give a branch, a tag, or a commit by all of its 40 digits",
                absent=True,
            )
        if code == "EntryNotFound":
            return _Failure(said="the file is not there (404)", help="open the repository again", absent=True)
        if status == 401 and self._secret:
            return _Failure(
                said="not found, or the token was refused (401)",
                help="check the name, and log in again with `hf auth login`",
                absent=True,
            )
        return _Failure(
            said=f"not found or no access ({status})",
            help="check the name, or log in with `hf auth login`",
            absent=True,
        )

    def _broken(self, error: Exception) -> _Failure:
        """What an exception of the HTTP client means. Its own text is not quoted: it may quote our headers."""
        import httpx2

        reason, certificate = _system_reason(error)
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
            reason = reason or f"no connection within {self._patience.connect:.3g} s"
            return _Failure(
                said=f"could not reach {self._host} ({reason})",
                help="check SSL_CERT_FILE, or who answers in the Hub's place" if certificate else _NO_NETWORK,
                passing=not certificate,
                unreached=True,
            )
        if isinstance(error, httpx2.TimeoutException):
            return _Failure(
                said=f"{self._host} sent nothing for {self._patience.read:.3g} s", help=_TRY_LATER, passing=True
            )
        if isinstance(error, httpx2.LocalProtocolError):
            return _Failure(said="the request cannot be written as HTTP", help="check that the token is one line")
        if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError | OSError):
            broke = f" ({reason})" if reason else ""
            return _Failure(said=f"{self._host} broke off its answer{broke}", help=_TRY_LATER, passing=True)
        return _Failure(said=f"{self._host} gave an answer that cannot be decoded", help=_BAD_SERVER)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class _Deadline:
    """Ends a request after `seconds` by shutting its sockets: a read timeout starts anew with every byte that drips.

    `trace` learns of the sockets from the HTTP client; `sockets` outlives the request, as keep-alive ones do.
    """

    def __init__(self, seconds: float, sockets: list[socket.socket]) -> None:
        self.passed = False
        self._over = False
        self._sockets = sockets
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
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
            socket.socket.shutdown(each, socket.SHUT_RDWR)  # of a TLS socket too, without its farewell

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()


def _parse_name(name: str) -> tuple[str, str | None]:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    repository, at, revision = name.partition("@")
    valid = True
    try:
        validate_repo_id(repository)
    except HFValidationError:
        valid = False
    if not valid:
        raise UsageError(
            f"{_shown(name)} is not the name of a Hub repository, expected org/name or org/name@revision",
            help="copy the name from the head of the model's web page",
        )
    if at and (not revision or not revision.isprintable() or _BAD_REVISION.search(revision)):
        raise UsageError(
            f"{_shown(revision)} is not a revision, expected a branch, a tag or a commit after the @ of org/name@",
            help="leave out @ and what follows for the default branch",
        )
    return repository, revision or None


def _parse_endpoint(endpoint: str | None) -> str:
    from huggingface_hub import constants

    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc or not endpoint.isprintable():
        # Not quoted: what makes it unusable may be a password.
        raise UsageError(
            "the Hub's endpoint is not a plain address, expected one like https://huggingface.co",
            help="check HF_ENDPOINT; a token belongs into HF_TOKEN",
        )
    return endpoint


def _refuse_offline(name: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise RemoteError(
            f"{name}: the Hub is not reached in offline mode",
            help="unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or give a local directory",
        )


def _parse_listing(body: bytes) -> tuple[str, dict[str, int], str]:
    """The commit, the sizes, and what is wrong with them (nothing: an empty string)."""
    sizes: dict[str, int] = {}
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError):
        return "", sizes, "it is not JSON"
    commit = listing.get("sha") if isinstance(listing, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        return "", sizes, "it has no commit under 'sha'"
    siblings = listing.get("siblings")
    if not isinstance(siblings, list):
        return "", sizes, "it has no files under 'siblings'"
    for sibling in siblings:
        name = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(name, str):
            return "", sizes, "one of its files has no name"
        if not _is_plain_path(name):
            continue
        stored = sibling.get("lfs")
        size = stored.get("size") if isinstance(stored, dict) else sibling.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
            return "", sizes, f"it gives no size for a file named {_quoted(name)}"
        if name in sizes:
            return "", sizes, f"it names two files {_quoted(name)}"
        sizes[name] = size
    return commit, sizes, ""


def _is_plain_path(name: str) -> bool:
    """Whether `name` is a relative path that stays below its directory, on a terminal and in a URL alike."""
    return (
        name.isprintable()  # no control characters, no NUL, nothing that turns the text around, no lone surrogates
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def _redirect(url: httpx2.URL, response: httpx2.Response) -> httpx2.URL | _Failure:
    import httpx2

    try:
        target = url.join(response.headers["location"])
    except (KeyError, httpx2.InvalidURL):
        return _Failure(said=f"{url.host} redirected without saying where to", help=_BAD_SERVER)
    if target.scheme not in ("http", "https") or not target.host or target.userinfo:
        return _Failure(said=f"{url.host} redirected to something other than a plain web address", help=_BAD_SERVER)
    if (url.scheme, target.scheme) == ("https", "http") and not _is_loopback(target.host):
        return _Failure(
            said=f"{url.host} redirected from https to http at {target.host}, expected https", help=_BAD_SERVER
        )
    return target


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from `Retry-After` (a number or a date), or from the `RateLimit` that the Hub sends."""
    given = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", given):
        return float(given)
    if given:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    match = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})\b", headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _system_reason(error: BaseException) -> tuple[str, bool]:
    """The system's word for it, if it had one, and whether it is about a certificate."""
    cause: BaseException | None = error
    for _ in range(10):  # a chain may be long, and may be a loop
        if cause is None:
            break
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message}", True
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror, False
        cause = cause.__cause__ or cause.__context__
    return "", False


def _shown(text: str) -> str:
    """A caller's text, fit for one line of a message."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")


def _quoted(text: str) -> str:
    """A server's text, fit for one line of a message. Never a part of it: half a token would not be recognised."""
    return ascii(text) if len(text) <= 80 else f"of {len(text)} characters"


def _user_agent() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"bowline/{version('bowline')}"
    except PackageNotFoundError:  # run from a checkout
        return "bowline"
