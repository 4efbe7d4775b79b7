"""Only the requested ranges of a file are transferred."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.checkpoint.places.hub import HubRepository, RemoteFile, remote_file
from bowline.errors import CheckpointError, FormatError
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import COMMIT, CONFIG, WEIGHTS, OpenHub, answering, failure, read_weights


@given(data=st.data())
def test_any_range_holds_just_the_bytes_of_the_file(data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(WEIGHTS)))
    length = data.draw(st.integers(0, len(WEIGHTS) - offset))
    assert shared_file().read_at(offset, length) == WEIGHTS[offset : offset + length]


SHARED: list[RemoteFile] = []


def shared_file() -> RemoteFile:
    return SHARED[0]


@pytest.fixture(autouse=True, scope="module")
def one_hub_for_all_ranges() -> Iterator[None]:
    loopback = LoopbackHub(branches={"main": COMMIT}, commits={COMMIT: {"model.safetensors": WEIGHTS}})
    with loopback, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with HubRepository.open_repository("org/name", endpoint=loopback.endpoint, token=False) as repository:
            SHARED.append(repository.open("model.safetensors"))
            yield
    SHARED.clear()


def test_only_the_bytes_asked_for_are_transferred(hub: LoopbackHub, open_hub: OpenHub) -> None:
    assert read_weights(open_hub()) == WEIGHTS[200_000:205_000]
    assert hub.sent == 5000
    assert [request.headers["range"] for request in hub.of_kind("cdn")] == ["bytes=200000-204999"]


def test_a_safetensors_length_and_header_are_one_request(hub: LoopbackHub, open_hub: OpenHub) -> None:
    with open_hub().open("model.safetensors") as file:
        assert file.read_at(0, 8) == WEIGHTS[:8]
        assert file.read_at(8, 60_000) == WEIGHTS[8:60_008]
    assert [request.headers["range"] for request in hub.of_kind("cdn")] == ["bytes=0-131071"]


def test_a_header_longer_than_what_was_read_ahead_costs_only_its_rest(hub: LoopbackHub, open_hub: OpenHub) -> None:
    with open_hub().open("model.safetensors") as file:
        file.read_at(0, 8)
        assert file.read_at(8, 200_000) == WEIGHTS[8:200_008]
    assert [request.headers["range"] for request in hub.of_kind("cdn")] == ["bytes=0-131071", "bytes=131072-200007"]


def test_a_large_range_is_asked_for_in_pieces(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "LARGEST_REQUEST", 100_000)
    assert open_hub().read("model.safetensors") == WEIGHTS
    assert [request.headers["range"] for request in hub.of_kind("cdn")] == [
        "bytes=0-99999",
        "bytes=100000-199999",
        "bytes=200000-262143",
    ]


def test_a_small_file_is_one_request_and_an_empty_one_none(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    assert repository.read("config.json") == CONFIG
    assert repository.read("empty.txt") == b""
    assert [request.headers["range"] for request in hub.requests[1:]] == ["bytes=0-28"]


def test_a_range_outside_the_file_is_refused_without_a_request(hub: LoopbackHub, open_hub: OpenHub) -> None:
    file = open_hub().open("config.json")
    failure(lambda: file.read_at(20, 10), FormatError)
    assert len(hub.requests) == 1


def test_files_read_one_after_another_share_a_connection(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    for _ in range(3):
        repository.read("config.json")
        read_weights(repository)
    assert len({request.client for request in hub.requests if request.kind != "cdn"}) == 1
    assert len({request.client for request in hub.of_kind("cdn")}) == 1


def test_one_file_may_be_read_from_several_threads(open_hub: OpenHub) -> None:
    with open_hub().open("model.safetensors") as file, ThreadPoolExecutor(4) as pool:
        starts = range(0, 256_000, 8000)
        read = list(pool.map(lambda start: file.read_at(start, 8000), starts))
    assert read == [WEIGHTS[start : start + 8000] for start in starts]


def test_a_server_that_sends_the_whole_file_to_who_asked_for_the_whole_file_is_right(
    hub: LoopbackHub, open_hub: OpenHub
) -> None:
    hub.faults["resolve"] = iter([answering(200)])
    assert open_hub().read("config.json") == CONFIG


def test_a_closed_file_and_a_closed_repository_are_not_read(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    file, other = repository.open("config.json"), repository.open("config.json")
    file.close()
    assert "closed" in failure(lambda: file.read_at(0, 1))
    repository.close()
    assert "closed" in failure(lambda: other.read_at(0, 1))
    assert len(hub.requests) == 1


def test_a_file_that_is_not_listed_is_refused_without_a_request(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    assert "files, but not 'model-00002.safetensors'" in failure(
        lambda: repository.open("model-00002.safetensors"), CheckpointError
    )
    assert len(hub.requests) == 1
