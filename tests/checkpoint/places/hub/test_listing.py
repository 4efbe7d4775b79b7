"""A repository is listed with one request, and an incomplete listing is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from bowline.checkpoint.places.hub import file_listing as listing_module
from bowline.errors import CheckpointError
from tests.checkpoint.loopback_hub import LoopbackHub, commit_of
from tests.checkpoint.places.hub.asking import COMMIT, CONFIG, WEIGHTS, OpenHub, answering, failure, read_weights


def test_the_listing_gives_names_sizes_and_the_commit_in_one_request(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    assert dict(repository.sizes()) == {"config.json": 29, "empty.txt": 0, "model.safetensors": 262_144}
    assert repository.commit == COMMIT
    assert repository.location == f"org/name@{COMMIT}"
    assert [request.path for request in hub.requests] == ["/api/models/org/name?blobs=true"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"parameters": {"F32": 7, "I64": 1}, "total": 8}, {"F32": 7, "I64": 1}),
        (None, {}), ([], {}), ({"parameters": {"F32": "7"}}, {}), ({"parameters": {"F32": -1}}, {}), ({"total": 8}, {}),
    ],
)  # fmt: skip
def test_the_hubs_count_of_parameters_comes_with_the_listing(
    hub: LoopbackHub, open_hub: OpenHub, stated: object, expected: dict[str, int]
) -> None:
    hub.listing = lambda listing: {**listing, "safetensors": stated}
    assert dict(open_hub().parameters) == expected
    assert dict(open_hub(f"org/name@{COMMIT}").parameters) == {}
    assert len(hub.requests) == 2


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "a/b", COMMIT])
def test_a_revision_may_be_a_branch_a_tag_a_pull_request_or_a_commit(
    hub: LoopbackHub, open_hub: OpenHub, revision: str
) -> None:
    hub.branches |= {"v1.0": COMMIT, "refs/pr/1": COMMIT, "a/b": COMMIT}
    assert open_hub(f"org/name@{revision}").commit == COMMIT


def test_a_name_without_an_organisation_is_a_repository_too(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.repository = "gpt2"
    assert open_hub("gpt2").read("config.json") == CONFIG


def test_every_read_is_of_the_commit_that_was_listed_though_the_branch_moves(
    hub: LoopbackHub, open_hub: OpenHub
) -> None:
    repository = open_hub("org/name@main")
    hub.commits[commit_of("second")] = {"config.json": b"x" * 29, "model.safetensors": bytes(262_144)}
    hub.branches["main"] = commit_of("second")
    assert repository.read("config.json") == CONFIG
    assert read_weights(repository) == WEIGHTS[200_000:205_000]
    assert all(f"/resolve/{COMMIT}/" in request.path for request in hub.requests[1:])


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "a\nb", "a\0b", "a\x1b[2J", "\u202eb", ""],
)
def test_a_listed_name_that_is_no_plain_relative_path_is_left_out(
    hub: LoopbackHub, open_hub: OpenHub, name: str
) -> None:
    hub.commits[COMMIT] = {name: b"1", "config.json": CONFIG}
    repository = open_hub()
    assert list(repository.sizes()) == ["config.json"]
    assert repository.way_out(name)
    failure(lambda: repository.open(name), CheckpointError)
    assert len(hub.requests) == 1


def test_a_lone_surrogate_in_a_listed_name_is_left_out(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.listing = lambda listing: {**listing, "siblings": [{"rfilename": "\ud800", "size": 1}]}
    assert not open_hub().sizes()


@pytest.mark.parametrize(
    "name", ["sub/model 1.bin", "100%.json", "a?b#c.json", "模型.json", "a;b&c=d+e.json", "%2e%2e"]
)
def test_a_name_that_needs_quoting_in_an_address_is_read_as_listed(
    hub: LoopbackHub, open_hub: OpenHub, name: str
) -> None:
    hub.commits[COMMIT] = {name: b"these bytes"}
    assert open_hub().read(name) == b"these bytes"


def without_sizes(listing: dict[str, Any]) -> object:
    return {**listing, "siblings": [{"rfilename": each["rfilename"]} for each in listing["siblings"]]}


@pytest.mark.parametrize(
    ("listing", "problem"),
    [
        (lambda listing: b"<html>log in to this wifi</html>", "not JSON"),
        (lambda listing: b"[" * 100_000, "not JSON"),
        (lambda listing: json.dumps(listing).encode()[:-5], "not JSON"),
        (lambda listing: [listing], "no commit"),
        (lambda listing: {**listing, "sha": "main"}, "no commit"),
        (lambda listing: {**listing, "sha": None}, "no commit"),
        (lambda listing: {**listing, "siblings": None}, "no files"),
        (lambda listing: {**listing, "siblings": ["config.json"]}, "no name"),
        (without_sizes, "no size for a file named 'config.json'"),
        (lambda listing: {**listing, "siblings": [{"rfilename": "a", "size": -1}]}, "no size for a file named 'a'"),
        (lambda listing: {**listing, "siblings": [{"rfilename": "a", "size": True}]}, "no size for a file named 'a'"),
        (lambda listing: {**listing, "siblings": listing["siblings"] * 2}, "lists two files named 'config.json'"),
    ],
)
def test_a_listing_that_is_none_is_refused(
    hub: LoopbackHub, open_hub: OpenHub, listing: Callable[[dict[str, Any]], object], problem: str
) -> None:
    hub.listing = listing
    message = failure(open_hub)
    assert message.startswith("org/name: 127.0.0.1 did not answer with a listing: ")
    assert problem in message


def test_a_listing_of_another_commit_than_the_one_asked_for_is_refused(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.listing = lambda listing: {**listing, "sha": commit_of("second")}
    assert commit_of("second") in failure(lambda: open_hub(f"org/name@{COMMIT}"))


def test_a_listing_without_an_end_is_cut_off(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_module, "LARGEST_LISTING", 1000)
    hub.faults["api"] = iter([answering(200, b" " * 1001)])
    assert "larger than 1000 bytes" in failure(open_hub)


def test_a_compressed_listing_is_read(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.faults["api"] = iter(
        [lambda answer: answer.send(200, gzip.compress(answer.body), {"Content-Encoding": "gzip"})]
    )
    assert open_hub().commit == COMMIT
