"""Checks the targets of redirects."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from bowline.checkpoint.places.hub.request_failure import BAD_SERVER, RequestFailure

if TYPE_CHECKING:
    import httpx2

__all__ = ["REDIRECTS", "origin", "redirect"]

REDIRECTS = frozenset({301, 302, 303, 307, 308})


def redirect(url: httpx2.URL, response: httpx2.Response) -> httpx2.URL | RequestFailure:
    """The address that a redirect of `url` leads to: http(s), without a login, and never from https to http."""
    import httpx2

    try:
        target = url.join(response.headers["location"])
    except (KeyError, httpx2.InvalidURL):
        return RequestFailure(said=f"{url.host} redirected without a valid target", help=BAD_SERVER)
    if target.scheme not in ("http", "https") or not target.host or target.userinfo:
        return RequestFailure(
            said=f"{url.host} redirected to an address that is not a plain http(s) one", help=BAD_SERVER
        )
    if (url.scheme, target.scheme) == ("https", "http") and not _is_loopback(target.host):
        return RequestFailure(
            said=f"{url.host} redirected from https to http at {target.host}, expected https", help=BAD_SERVER
        )
    return target


def origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    """Scheme, host and port of an address; a token belongs to one origin."""
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
