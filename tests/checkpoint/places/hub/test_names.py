"""Invalid names are refused before any request."""

from __future__ import annotations

import pytest

from bowline.errors import UsageError
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import TOKEN, OpenHub, failure


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b/c",
        "org/",
        "/name",
        "org/na me",
        "org/name\n",
        "org--x/name",
        "../name",
        "org/name.git",
        "org/näme",
        "@main",
    ],
)
def test_a_name_that_cannot_be_a_repository_is_refused_before_any_request(
    hub: LoopbackHub, open_hub: OpenHub, name: str
) -> None:
    assert "expected org/name or org/name@revision" in failure(lambda: open_hub(name), UsageError)
    assert not hub.requests


@pytest.mark.parametrize(
    "revision", ["", "a b", "a..b", "a\nb", "-x", "/x", "x/", "a//b", "a@b", "a?b", "x.lock", "\x00"]
)
def test_a_revision_that_cannot_be_one_is_refused_before_any_request(
    hub: LoopbackHub, open_hub: OpenHub, revision: str
) -> None:
    assert "is not a revision" in failure(lambda: open_hub(f"org/name@{revision}"), UsageError)
    assert not hub.requests


@pytest.mark.parametrize(
    "endpoint",
    ["huggingface.co", "ftp://hub", "http://", "http://[::1", "http://h:x", f"https://u:{TOKEN}@hub", "http://h?a"],
)
def test_an_endpoint_that_is_no_plain_address_is_refused_unquoted(open_hub: OpenHub, endpoint: str) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        open_hub(endpoint=endpoint)
    assert TOKEN not in str(caught.value)
