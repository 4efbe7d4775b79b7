"""Checks the names that a caller gives: repository, revision, endpoint and file; and formats them for messages."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from bowline.errors import UsageError

__all__ = ["is_plain_path", "parse_endpoint", "parse_name", "shown"]

_BAD_REVISION = re.compile(r"[\s~^:?*\[\\@]|\.\.|//|^[-/.]|[/.]$|\.lock$")


def parse_name(name: str) -> tuple[str, str | None]:
    """Split `org/name@revision` into the repository and the revision."""
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
            f"{shown(name)} is not the name of a Hub repository, expected org/name or org/name@revision",
            help="copy the name from the top of the model's web page",
        )
    if at and (not revision or not revision.isprintable() or _BAD_REVISION.search(revision)):
        raise UsageError(
            f"{shown(revision)} is not a revision, expected a branch, a tag or a commit after the @ of org/name@",
            help="leave out the @ and the revision to get the default branch",
        )
    return repository, revision or None


def parse_endpoint(endpoint: str | None) -> str:
    """The Hub's address without a slash at its end; by default `HF_ENDPOINT` or the public one."""
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
            help="check HF_ENDPOINT; put a token into HF_TOKEN",
        )
    return endpoint


def is_plain_path(name: str) -> bool:
    """Whether `name` is a printable relative path that stays below its directory, on disk and in a URL."""
    return (
        name.isprintable()  # no control characters, no NUL, nothing that turns the text around, no lone surrogates
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def shown(text: str) -> str:
    """A caller's text as one line of a message."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")
