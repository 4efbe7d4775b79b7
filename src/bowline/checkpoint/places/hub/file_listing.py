"""Lists the files of a repository with one request; an incomplete listing is an error.

The Hub's answer also states how many parameters it counted in the safetensors, by dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from bowline.checkpoint.places.hub.client import Client
from bowline.checkpoint.places.hub.repository_name import is_plain_path
from bowline.checkpoint.places.hub.request_failure import BAD_SERVER, RequestFailure, quoted
from bowline.errors import NoCheckpointError, RemoteError

if TYPE_CHECKING:
    import httpx2

__all__ = ["list_repository"]

LARGEST_LISTING = 64 << 20

_COMMIT = re.compile(r"[0-9a-f]{40}")


def list_repository(
    client: Client, repository: str, revision: str | None
) -> tuple[str, dict[str, int], dict[str, int]]:
    """The commit that `revision` points to, the sizes of its files, and the Hub's count of parameters by dtype.

    The count is empty if the Hub states none.
    """
    commit = ""
    sizes: dict[str, int] = {}
    counted: dict[str, int] = {}

    def accept(response: httpx2.Response) -> RequestFailure | None:
        nonlocal commit, sizes, counted
        if response.status_code != 200:
            return RequestFailure(said=f"{response.url.host} answered {response.status_code}", help=BAD_SERVER)
        body = bytearray()
        for chunk in response.iter_bytes():
            body.extend(chunk)
            if len(body) > LARGEST_LISTING:
                return RequestFailure(said=f"the listing is larger than {LARGEST_LISTING} bytes", help=BAD_SERVER)
        commit, sizes, counted, problem = _parse(bytes(body))
        if not problem and revision and _COMMIT.fullmatch(revision) and commit != revision:
            problem = f"it is for commit {commit}"
        if not problem:
            return None
        host = urlsplit(client.endpoint).hostname
        return RequestFailure(said=f"{host} did not answer with a listing: {problem}", help=BAD_SERVER)

    at = f"/revision/{quote(revision, safe='')}" if revision else ""
    failure = client.get(f"api/models/{repository}{at}?blobs=true", accept=accept)
    if failure:
        name = f"{repository}@{revision}" if revision else repository
        raise failure.error(name, NoCheckpointError if failure.absent else RemoteError)
    return commit, sizes, counted


def _parse(body: bytes) -> tuple[str, dict[str, int], dict[str, int], str]:
    """The commit, the sizes, the counts, and what is wrong with the listing (an empty string if nothing is)."""
    sizes: dict[str, int] = {}
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError):
        return "", sizes, {}, "it is not JSON"
    commit = listing.get("sha") if isinstance(listing, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        return "", sizes, {}, "it has no commit under 'sha'"
    siblings = listing.get("siblings")
    if not isinstance(siblings, list):
        return "", sizes, {}, "it has no files under 'siblings'"
    for sibling in siblings:
        name = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(name, str):
            return "", sizes, {}, "one of its files has no name"
        if not is_plain_path(name):
            continue
        stored = sibling.get("lfs")
        size = stored.get("size") if isinstance(stored, dict) else sibling.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
            return "", sizes, {}, f"it gives no size for a file named {quoted(name)}"
        if name in sizes:
            return "", sizes, {}, f"it lists two files named {quoted(name)}"
        sizes[name] = size
    return commit, sizes, _counted(listing), ""


def _counted(listing: Mapping[str, Any]) -> dict[str, int]:
    """The number of parameters by dtype; a count in any other form is as none, because nothing hangs on it."""
    stated = listing.get("safetensors")
    by_dtype = stated.get("parameters") if isinstance(stated, dict) else None
    if not isinstance(by_dtype, dict) or not all(type(count) is int and count >= 0 for count in by_dtype.values()):
        return {}
    return dict(by_dtype)
