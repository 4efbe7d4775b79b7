"""Makes one attempt at a request: sends the token to the Hub alone, follows redirects, and keeps a deadline."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bowline.checkpoint.places.hub.access_token import Secret
from bowline.checkpoint.places.hub.redirect import REDIRECTS, origin, redirect
from bowline.checkpoint.places.hub.request_failure import BAD_SERVER, TRY_LATER, Accept, RequestFailure, broken, denial
from bowline.checkpoint.places.hub.time_limits import Deadline, Patience

if TYPE_CHECKING:
    import httpx2

__all__ = ["Connection"]

MOST_REDIRECTS = 5
SMALL_BODY = 16 << 10


class Connection:
    """A keep-alive HTTP client, used for one request at a time."""

    def __init__(
        self, endpoint: str, secret: Secret, patience: Patience, certificates: Callable[[], ssl.SSLContext]
    ) -> None:
        self._endpoint = endpoint
        self._certificates = certificates
        self._secret = secret
        self._patience = patience
        self._client: httpx2.Client | None = None
        self._sockets: list[socket.socket] = []
        self._host = urlsplit(endpoint).hostname or endpoint

    def get(self, url: str, headers: dict[str, str], seconds: float, accept: Accept) -> RequestFailure | None:
        """Make one attempt, redirects included. No exception of the HTTP client leaves this method."""
        import httpx2

        if self._client is None:
            try:
                self._client = httpx2.Client(
                    headers={"User-Agent": _user_agent(), "Accept-Encoding": "identity"}, verify=self._certificates()
                )
            except (ImportError, OSError, ValueError) as error:  # a proxy's address may hold a password: not quoted
                return RequestFailure(
                    said=f"no HTTP client could be set up ({type(error).__name__})",
                    help="check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
                )
        deadline = Deadline(seconds, self._sockets)
        try:
            with deadline:
                failure = self._follow(self._client, httpx2.URL(url), headers, deadline, accept)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            failure = broken(error, self._host, self._patience)
        if deadline.passed:
            return RequestFailure(
                said=f"{self._host} had not finished its answer after {seconds:.3g} s", help=TRY_LATER
            )
        return failure

    def _follow(
        self, client: httpx2.Client, url: httpx2.URL, headers: dict[str, str], deadline: Deadline, accept: Accept
    ) -> RequestFailure | None:
        import httpx2

        timeout = httpx2.Timeout(self._patience.read, connect=self._patience.connect)
        trusted = True
        for _ in range(MOST_REDIRECTS + 1):
            # The token goes neither to the storage that the Hub redirects to, nor to any later host.
            trusted = trusted and origin(url) == origin(httpx2.URL(self._endpoint))
            self._host = url.host
            request = client.build_request(
                "GET",
                url,
                headers=httpx2.Headers(headers | (self._secret.header() if trusted else {})),
                timeout=timeout,
                extensions={"trace": deadline.trace},
            )
            response = client.send(request, stream=True, follow_redirects=False)
            with contextlib.closing(response):
                if response.status_code not in REDIRECTS:
                    refused = denial(response, from_hub=trusted, with_token=bool(self._secret))
                    return refused or accept(response)
                target = redirect(url, response)
                if isinstance(target, RequestFailure):
                    return target
                length = response.headers.get("content-length", "")
                if length.isdecimal() and int(length) <= SMALL_BODY:
                    for _chunk in response.iter_raw():  # read to its end, the connection can be used again
                        pass
                url = target
        return RequestFailure(
            said=f"redirected more than {MOST_REDIRECTS} times, last by {self._host}", help=BAD_SERVER
        )

    def close(self) -> None:
        """Close the sockets; the next request opens new ones."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _user_agent() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"bowline/{version('bowline')}"
    except PackageNotFoundError:  # run from a checkout
        return "bowline"
