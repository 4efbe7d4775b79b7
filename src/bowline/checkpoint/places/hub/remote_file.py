"""Random access to a file of a repository, in exact ranges."""

from __future__ import annotations

from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.hub.byte_range import ByteRange
from bowline.checkpoint.places.hub.client import Client
from bowline.errors import RemoteError

__all__ = ["RemoteFile"]

LARGEST_REQUEST = 16 << 20
"""The largest range of one request, which a retry has to fetch again."""

READ_AHEAD = 128 << 10
"""The first small read near a file's start fetches this much: a safetensors length and its header are one request."""


class RemoteFile(ByteSource):
    """A file of a `HubRepository`: every read is the exact range or a `RemoteError`.

    An answer is accepted if it is `206` with the `Content-Range` that was asked for, the listed size as its total, no
    content encoding, and a body of exactly that length. A plain `200` is accepted for a range that is the whole file,
    under the same conditions; otherwise it is refused before its body is read.

    Several threads may read at once; each then has its own connection.
    """

    def __init__(self, client: Client, location: str, name: str, path: str, size: int) -> None:
        self.name = name
        self.size = size
        self._hub = client
        self._location = location
        self._path = path
        self._start = b""
        self._closed = False

    def _fill(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise RemoteError(f"{self._location}: {self.name}: was read after it was closed", help="open it again")
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
        asked = ByteRange(offset, len(buffer), self.size)
        failure = self._hub.get(
            self._path,
            accept=lambda response: asked.receive(response, buffer),
            headers={"Range": asked.header},
            seconds_for=len(buffer),
        )
        if failure:
            raise failure.error(f"{self._location}: {self.name}: bytes {asked}", RemoteError)

    def close(self) -> None:
        """Release the bytes that were read ahead; the repository keeps the connection for its next file."""
        self._closed = True
        self._start = b""

    def __repr__(self) -> str:
        return f"RemoteFile({self.name!r}, {self.size} bytes, {self._location!r})"
