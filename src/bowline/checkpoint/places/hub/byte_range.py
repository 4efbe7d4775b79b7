"""A byte range of a remote file: its request header, and the check that an answer is exactly that range."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bowline.checkpoint.places.hub.request_failure import BAD_SERVER, TRY_LATER, RequestFailure, quoted

if TYPE_CHECKING:
    import httpx2

__all__ = ["ByteRange"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


@dataclass(frozen=True)
class ByteRange:
    """Bytes `offset` to `offset + length` of a file of `total` bytes."""

    offset: int
    length: int
    total: int

    def __str__(self) -> str:
        return f"{self.offset}-{self.offset + self.length - 1}"

    @property
    def header(self) -> str:
        """The value of the `Range` header that asks for these bytes."""
        return f"bytes={self}"

    def receive(self, response: httpx2.Response, buffer: memoryview) -> RequestFailure | None:
        """Read the answer into `buffer`, or return why it is not this range; a refused answer is not downloaded."""
        return self._refusal(response) or self._fill(buffer, response)

    def _refusal(self, response: httpx2.Response) -> RequestFailure | None:
        host, status, headers = response.url.host, response.status_code, response.headers
        encoding = headers.get("content-encoding", "").strip().lower()
        length = headers.get("content-length", str(self.length))
        if status != 206 and not (status == 200 and self.length == self.total):
            ignored = ": it ignores ranges and would send the whole file" if status == 200 else ""
            said = f"answered {status}, expected 206{ignored}"
        elif encoding not in ("", "identity"):
            said = f"answered with content encoding {quoted(encoding)}, expected unencoded bytes"
        elif headers.get("content-type", "").strip().lower().startswith("multipart/"):
            said = "answered with several parts, expected one range"
        elif status == 206 and (misplaced := self._misplaced(host, headers.get("content-range", ""))):
            return misplaced
        elif length.strip() != str(self.length):
            said = f"announced a body of {quoted(length)} bytes, expected {self.length}"
        else:
            return None
        return RequestFailure(said=f"{host} {said}", help=BAD_SERVER)

    def _misplaced(self, host: str, content_range: str) -> RequestFailure | None:
        match = _CONTENT_RANGE.fullmatch(content_range.strip())
        first, last, total = map(int, match.groups()) if match else (None, None, None)
        if total not in (None, self.total):
            return RequestFailure(
                said=f"the file has {total} bytes at {host}, but {self.total} in the Hub's listing",
                help="the listing and the storage disagree; report it to the repository's owner",
            )
        if (first, last) != (self.offset, self.offset + self.length - 1):
            return RequestFailure(
                said=f"{host} answered with Content-Range {quoted(content_range)}, "
                f"expected 'bytes {self}/{self.total}'",
                help=BAD_SERVER,
            )
        return None

    def _fill(self, buffer: memoryview, response: httpx2.Response) -> RequestFailure | None:
        host, done = response.url.host, 0
        for chunk in response.iter_raw():
            if done + len(chunk) > self.length:
                return RequestFailure(said=f"{host} sent more than {self.length} bytes", help=BAD_SERVER)
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)
        if done < self.length:
            return RequestFailure(
                said=f"{host} sent {done} bytes, expected {self.length}", help=TRY_LATER, passing=True
            )
        return None
