"""The allowed targets of redirects."""

from __future__ import annotations

import itertools

import pytest

from bowline.checkpoint.places.hub.redirect import origin, redirect
from bowline.checkpoint.places.hub.request_failure import RequestFailure
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import OpenHub, answering, failure


def test_a_redirect_without_an_end_is_left(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.faults["resolve"] = itertools.repeat(lambda answer: answer.send(302, b"", {"Location": answer.handler.path}))
    repository = open_hub()
    assert "redirected more than 5 times" in failure(lambda: repository.read("config.json"))
    assert len(hub.of_kind("resolve")) == 6


@pytest.mark.parametrize(
    ("location", "said"),
    [
        (None, "without a valid target"),
        ("http://[::1", "without a valid target"),
        ("file:///etc/passwd", "an address that is not a plain http(s) one"),
        ("ftp://127.0.0.1/", "an address that is not a plain http(s) one"),
        ("http://user:password@127.0.0.1/", "an address that is not a plain http(s) one"),
    ],
)
def test_a_redirect_to_something_else_than_the_web_is_not_followed(
    hub: LoopbackHub, open_hub: OpenHub, location: str | None, said: str
) -> None:
    hub.faults["resolve"] = iter([answering(302, b"", Location=location)])
    repository = open_hub()
    assert said in failure(lambda: repository.read("config.json"))


@pytest.mark.parametrize(
    ("source", "target", "followed"),
    [
        ("https://huggingface.co/", "http://storage.example/", False),
        ("https://huggingface.co/", "http://127.0.0.1.example/", False),
        ("https://localhost/", "http://127.0.0.1/", True),
        ("https://localhost/", "http://[::1]/", True),
        ("https://huggingface.co/", "//storage.example/", True),
        ("http://mirror.example/", "https://storage.example/", True),
    ],
)
def test_a_redirect_from_https_to_http_is_not_followed_off_this_machine(
    source: str, target: str, followed: bool
) -> None:
    import httpx2

    response = httpx2.Response(302, headers={"Location": target})
    got = redirect(httpx2.URL(source), response)
    assert isinstance(got, httpx2.URL) is followed
    if isinstance(got, RequestFailure):
        assert "expected https" in got.said


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://huggingface.co/a", "https://huggingface.co:443/b", True),
        ("https://huggingface.co/", "http://huggingface.co/", False),
        ("https://huggingface.co/", "https://huggingface.co:8443/", False),
        ("https://huggingface.co/", "https://cdn.huggingface.co/", False),
        ("https://huggingface.co/", "https://HuggingFace.co/", True),
    ],
)
def test_an_origin_is_scheme_host_and_port(one: str, other: str, same: bool) -> None:
    import httpx2

    assert (origin(httpx2.URL(one)) == origin(httpx2.URL(other))) is same
