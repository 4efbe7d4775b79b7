"""A repository at one commit, as a set of files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self
from urllib.parse import quote

from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.hub.access_token import Secret
from bowline.checkpoint.places.hub.client import Client
from bowline.checkpoint.places.hub.file_listing import list_repository
from bowline.checkpoint.places.hub.remote_file import RemoteFile
from bowline.checkpoint.places.hub.repository_name import is_plain_path, parse_endpoint, parse_name, shown
from bowline.checkpoint.places.hub.time_limits import Patience
from bowline.errors import CheckpointError, RemoteError

__all__ = ["HubRepository"]


class HubRepository(FileSet):
    """A model repository at one commit: `sizes()` as listed, each file as a `RemoteFile`.

    `repository` is `org/name`, `commit` the full hash, and `location` the two together, which opens it again.
    Files whose names are not safe relative paths (`..`, a leading `/`, a backslash, control characters)
    are left out of `sizes()`.

    Example:
        >>> with HubRepository.open_repository("openai-community/gpt2") as files:  # doctest: +SKIP
        ...     config = files.read("config.json")
    """

    parallel_reads = 8

    def __init__(
        self,
        client: Client,
        repository: str,
        commit: str,
        sizes: Mapping[str, int],
        counted: Mapping[str, int] | None = None,
    ) -> None:
        self.repository = repository
        self.commit = commit
        self.location = f"{repository}@{commit}"
        self._hub = client
        self._sizes = MappingProxyType(dict(sorted(sizes.items())))
        self.parameters = MappingProxyType(dict(counted or {}))

    @classmethod
    def open_repository(
        cls,
        name: str,
        *,
        endpoint: str | None = None,
        token: str | bool | None = None,
        patience: Patience | None = None,
    ) -> Self:
        """List `org/name`, `org/name@revision` or `name`, and pin the commit that the revision points to now.

        `endpoint` and `token` default to what `huggingface_hub` would use: `HF_ENDPOINT`, and `HF_TOKEN` or the
        stored login. `token=False` sends none. The token goes to the endpoint only, and into no message.

        Raises:
            UsageError: the name, the revision or the endpoint is not a valid one.
            NoCheckpointError: there is no such repository or revision, or no access to it.
            RemoteError: the Hub could not be reached, or its answer is not a listing.
        """
        secret = Secret(token)
        del token  # so that no traceback that shows local variables shows it
        repository, revision = parse_name(name)
        address = parse_endpoint(endpoint)
        _refuse_offline(name)  # before a stored login may be renewed, which takes a request
        client = Client(address, secret.resolved(), patience or Patience())
        try:
            commit, sizes, counted = list_repository(client, repository, revision)
        except BaseException:
            client.close()
            raise
        return cls(client, repository, commit, sizes, {} if revision else counted)  # the Hub counts the main branch

    def place_of(self, name: str) -> str:
        """The text with which a user would open this one file: `org/name/file@commit`."""
        return f"{self.repository}/{name}@{self.commit}"

    def sizes(self) -> Mapping[str, int]:
        """Every file's size in bytes, by name, as the Hub lists them for this commit."""
        return self._sizes

    def open(self, name: str) -> RemoteFile:
        """Open a file; nothing is requested before the first read.

        Raises:
            CheckpointError: the listing has no such file.
        """
        if name not in self._sizes:
            raise CheckpointError(
                f"{self.location}: the repository lists {len(self._sizes)} files, but not {shown(name)}",
                help="the repository is incomplete, or its index names a file that was never uploaded",
            )
        path = f"{self.repository}/resolve/{self.commit}/{quote(name)}"
        return RemoteFile(self._hub, self.location, name, path, self._sizes[name])

    def way_out(self, name: str) -> str | None:
        """A phrase that says how `name` leads out of the repository, or `None` when it stays inside."""
        return None if is_plain_path(name) else "is not a path inside the repository"

    def close(self) -> None:
        """Close the connections; reads from files that are still open are errors."""
        self._hub.close()

    def __repr__(self) -> str:
        return f"HubRepository({self.location!r})"


def _refuse_offline(name: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise RemoteError(
            f"{name}: offline mode is on, so the Hub was not contacted",
            help="unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or give a local directory",
        )
