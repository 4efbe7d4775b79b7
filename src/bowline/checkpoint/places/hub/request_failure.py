"""Explains failed requests: the meaning of an error status or a broken connection, and the way out."""

from __future__ import annotations

import contextlib
import email.utils
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bowline.errors import CheckpointError

if TYPE_CHECKING:
    import httpx2

    from bowline.checkpoint.places.hub.time_limits import Patience

__all__ = ["BAD_SERVER", "TRY_LATER", "Accept", "RequestFailure", "broken", "denial", "quoted"]

TRY_LATER = "try again later, or give a local directory"
BAD_SERVER = "check HF_ENDPOINT and the proxy, or give a local directory"

_NO_NETWORK = "check the network, the proxy and HF_ENDPOINT, or give a local directory"
_LOG_IN = "log in with `hf auth login`"


@dataclass(frozen=True, kw_only=True)
class RequestFailure:
    """Why an attempt failed. A value, not an exception, since an exception would refer to headers with the token."""

    said: str
    help: str
    passing: bool = False  # another attempt may succeed
    wait: float | None = None  # as the server asked
    unreached: bool = False
    absent: bool = False

    def error(self, where: str, kind: type[CheckpointError]) -> CheckpointError:
        """The error to raise, outside any `except`: a chained exception would hold the request with its token."""
        return kind(f"{where}: {self.said}", help=self.help)


Accept: TypeAlias = "Callable[[httpx2.Response], RequestFailure | None]"
"""A function that reads an answer, or returns why it is not the one that was asked for."""


def denial(response: httpx2.Response, *, from_hub: bool, with_token: bool) -> RequestFailure | None:
    """The failure that an error status means; `None` if the caller has to judge the status."""
    host, status, headers = response.url.host, response.status_code, response.headers
    if status == 429:
        return RequestFailure(
            said=f"{host} answered 429: too many requests",
            help="wait some minutes; logged-in users (`hf auth login`) have a higher limit",
            passing=True,
            wait=_retry_after(headers),
        )
    if status == 408 or status >= 500:
        return RequestFailure(
            said=f"{host} answered {status}", help=TRY_LATER, passing=True, wait=_retry_after(headers)
        )
    if status == 416:
        return RequestFailure(
            said=f"{host} answered 416: the file ends before these bytes",
            help="the listing and the storage disagree; report it to the repository's owner",
        )
    if from_hub and status in (401, 403, 404):
        said, advice = _absence(status, headers.get("x-error-code", ""), with_token)
        return RequestFailure(said=said, help=advice, absent=True)
    return None


def _absence(status: int, code: str, with_token: bool) -> tuple[str, str]:
    match code:
        case "GatedRepo":
            return (
                f"the repository is gated, and no access was granted ({status})",
                f"accept its terms on its web page, then {_LOG_IN}",
            )
        case "RevisionNotFound":
            return "the repository has no such revision", "give a branch, a tag, or the full 40-digit commit hash"
        case "EntryNotFound":
            return "the file was not found (404)", "open the repository again"
    if status == 401 and with_token:
        return "not found, or the token was refused (401)", "check the name, and log in again with `hf auth login`"
    return f"not found or no access ({status})", f"check the name, or {_LOG_IN}"


def broken(error: Exception, host: str, patience: Patience) -> RequestFailure:
    """The failure that an exception of the HTTP client means. Its text is not quoted: it may quote our headers."""
    import httpx2

    reason, certificate = _system_reason(error)
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return RequestFailure(
            said=f"could not reach {host} ({reason or f'no connection within {patience.connect:.3g} s'})",
            help="check SSL_CERT_FILE, and whether a proxy answers in the Hub's place" if certificate else _NO_NETWORK,
            passing=not certificate,
            unreached=True,
        )
    if isinstance(error, httpx2.TimeoutException):
        return RequestFailure(said=f"{host} sent nothing for {patience.read:.3g} s", help=TRY_LATER, passing=True)
    if isinstance(error, httpx2.LocalProtocolError):
        return RequestFailure(said="the request is not valid HTTP", help="check that the token is one line")
    if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError | OSError):
        broke = f" ({reason})" if reason else ""
        return RequestFailure(
            said=f"{host} closed the connection during its answer{broke}", help=TRY_LATER, passing=True
        )
    return RequestFailure(said=f"{host} sent an answer that cannot be decoded", help=BAD_SERVER)


def quoted(text: str) -> str:
    """A server's text as one line of a message; never cut, since half a token would not be recognised."""
    return ascii(text) if len(text) <= 80 else f"({len(text)} characters)"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds to wait by `Retry-After` (a number or a date), or by the `RateLimit` that the Hub sends."""
    given = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", given):
        return float(given)
    if given:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    match = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})\b", headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _system_reason(error: BaseException) -> tuple[str, bool]:
    """The system's reason for an error, if it gave one, and whether the error is about a certificate."""
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
