"""A Hub repository is read in exact ranges of one commit, or not at all: against a Hub on the loopback interface."""

from __future__ import annotations

import email.utils
import gzip
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bowline
from bowline.checkpoint import hub as hub_module
from bowline.checkpoint.hub import HubRepository, Patience, RemoteFile
from bowline.errors import BowlineError, CheckpointError, FormatError, NoCheckpointError, RemoteError, UsageError
from tests.checkpoint.loopback_hub import Answer, Fault, LoopbackHub, commit_of

TOKEN = "hf_thisIsASecretThatNobodyMayRead"
COMMIT = commit_of("first")
CONFIG = b'{"tie_word_embeddings": true}'
WEIGHTS = bytes(range(256)) * 1024  # 256 KiB: more than is read ahead


@pytest.fixture(autouse=True)
def no_login_and_no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)


@pytest.fixture(autouse=True, scope="module")
def certificates_read_once() -> Iterator[None]:
    """Reading the certificates of the world takes longer than most of these tests, and none of them needs any."""
    import httpx2

    once = httpx2.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "create_ssl_context", lambda: once)
        yield


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    files = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "empty.txt": b""}
    with LoopbackHub(
        branches={"main": COMMIT}, commits={COMMIT: files}, stored_apart=frozenset({"model.safetensors"})
    ) as loopback:
        yield loopback


@pytest.fixture
def waits() -> list[float]:
    """The waits between attempts, in place of waiting."""
    return []


@pytest.fixture
def patience(waits: list[float]) -> Patience:
    return Patience(connect=2, read=5, deadline=10, attempts=4, longest_wait=60, sleep=waits.append)


@pytest.fixture
def open_hub(hub: LoopbackHub, patience: Patience) -> Iterator[Callable[..., HubRepository]]:
    opened: list[HubRepository] = []

    def open_repository(name: str = "org/name", **options: Any) -> HubRepository:
        defaults: dict[str, Any] = {"endpoint": hub.endpoint, "token": TOKEN, "patience": patience}
        opened.append(HubRepository.open_repository(name, **(defaults | options)))
        return opened[-1]

    yield open_repository
    for repository in opened:
        repository.close()


OpenHub = Callable[..., HubRepository]


def answering(status: int = 206, body: bytes | None = None, **headers: str | None) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda answer: answer.send(status, body, named)


def failure(read: Callable[[], object], kind: type[BowlineError] = RemoteError) -> str:
    """The error of `read`: of this kind, one line with a way out, and without the token anywhere in it."""
    with pytest.raises(kind) as caught:
        read()
    error = caught.value
    assert "\n" not in str(error)
    assert error.help
    chain: BaseException | None = error
    while chain is not None:
        assert TOKEN.lower() not in (str(chain) + repr(chain)).lower()
        chain = chain.__cause__ or chain.__context__
    library = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "bowline" in frame.f_code.co_filename]
    assert library
    assert all(TOKEN not in repr(frame.f_locals) for frame in library)
    assert TOKEN not in "".join(traceback.format_exception(error))
    return str(error)


def read_weights(repository: HubRepository, offset: int = 200_000, length: int = 5000) -> bytes:
    """A range beyond what is read ahead: one request for these very bytes."""
    with repository.open("model.safetensors") as file:
        return file.read_at(offset, length)


# --- what is listed -------------------------------------------------------------------------------------------------


def test_the_listing_gives_names_sizes_and_the_commit_in_one_request(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    assert dict(repository.sizes()) == {"config.json": 29, "empty.txt": 0, "model.safetensors": 262_144}
    assert repository.commit == COMMIT
    assert repository.location == f"org/name@{COMMIT[:12]}"
    assert [request.path for request in hub.requests] == ["/api/models/org/name?blobs=true"]


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
        (lambda listing: {**listing, "siblings": listing["siblings"] * 2}, "two files 'config.json'"),
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
    monkeypatch.setattr(hub_module, "LARGEST_LISTING", 1000)
    hub.faults["api"] = iter([answering(200, b" " * 1001)])
    assert "larger than 1000 bytes" in failure(open_hub)


def test_a_compressed_listing_is_read(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.faults["api"] = iter(
        [lambda answer: answer.send(200, gzip.compress(answer.body), {"Content-Encoding": "gzip"})]
    )
    assert open_hub().commit == COMMIT


# --- what is read ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
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
    monkeypatch.setattr(hub_module, "LARGEST_REQUEST", 100_000)
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
    assert "no file 'model-00002.safetensors'" in failure(
        lambda: repository.open("model-00002.safetensors"), CheckpointError
    )
    assert len(hub.requests) == 1


# --- where the token goes -------------------------------------------------------------------------------------------


def test_the_token_goes_to_the_hub_and_not_to_the_storage(hub: LoopbackHub, open_hub: OpenHub) -> None:
    read_weights(open_hub())
    sent = {request.kind: request.headers.get("authorization") for request in hub.requests}
    assert sent == {"api": f"Bearer {TOKEN}", "resolve": f"Bearer {TOKEN}", "cdn": None}


def test_the_token_does_not_come_back_with_a_redirect_from_the_storage(hub: LoopbackHub, open_hub: OpenHub) -> None:
    back = f"{hub.endpoint}/org/name/resolve/{COMMIT}/config.json"
    hub.faults["cdn"] = iter([answering(302, b"", Location=back)])
    hub.faults["resolve"] = itertools.chain(
        [answering(302, b"", Location=f"{hub.cdn}/org/name/resolve/{COMMIT}/config.json")]
    )
    assert open_hub().read("config.json") == CONFIG
    assert [request.headers.get("authorization") for request in hub.requests] == [f"Bearer {TOKEN}"] * 2 + [None] * 2


def test_a_redirect_within_the_hub_keeps_the_token(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.commits[COMMIT]["moved.json"] = CONFIG
    hub.faults["resolve"] = iter([answering(307, b"", Location=f"/org/name/resolve/{COMMIT}/moved.json")])
    assert open_hub().read("config.json") == CONFIG
    assert {request.headers.get("authorization") for request in hub.requests} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("token", "sent"), [(False, None), (None, "Bearer hf_environment"), (True, "Bearer hf_environment")]
)
def test_without_a_token_given_the_login_of_huggingface_hub_is_used(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch, token: bool | None, sent: str | None
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    open_hub(token=token)
    assert hub.requests[0].headers.get("authorization") == sent


def test_a_login_that_is_not_to_be_used_unasked_is_not_used(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    open_hub(token=None)
    assert "authorization" not in hub.requests[0].headers


def test_a_token_that_is_demanded_and_not_there_is_an_error(open_hub: OpenHub) -> None:
    assert "no Hugging Face token is stored" in failure(lambda: open_hub(token=True), UsageError)


def test_a_login_that_cannot_be_read_is_an_error_without_its_text(
    open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_token() -> str:
        raise ValueError(f"bad token {TOKEN}")

    monkeypatch.setattr("huggingface_hub.get_token", get_token)
    assert "could not be read (ValueError)" in failure(lambda: open_hub(token=None))


def test_a_token_that_breaks_the_request_is_not_shown(open_hub: OpenHub) -> None:
    assert "cannot be written as HTTP" in failure(lambda: open_hub(token=f"{TOKEN}\nX-Other: 1"))


@pytest.mark.parametrize("name", ["Content-Range", "Content-Encoding", "Content-Length", "Location"])
def test_a_token_that_the_server_echoes_is_not_shown(hub: LoopbackHub, open_hub: OpenHub, name: str) -> None:
    status = 302 if name == "Location" else 206
    hub.faults["resolve"] = itertools.repeat(lambda answer: answer.send(status, headers={name: f"http://{TOKEN}/"}))
    repository = open_hub()
    failure(lambda: repository.read("config.json"))


def test_nothing_that_is_shown_shows_the_token(open_hub: OpenHub) -> None:
    repository = open_hub()
    file = repository.open("config.json")
    assert repr(repository) == f"HubRepository('org/name@{COMMIT[:12]}')"
    assert repr(file) == f"RemoteFile('config.json', 29 bytes, 'org/name@{COMMIT[:12]}')"
    assert TOKEN not in repr((vars(repository), vars(file), vars(vars(repository)["_hub"])))


# --- answers that are refused at once -------------------------------------------------------------------------------


def chunked(*chunks: bytes) -> Fault:
    def answer_in_chunks(answer: Answer) -> None:
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
        answer.send(206, body, {"Content-Length": None, "Transfer-Encoding": "chunked"})

    return answer_in_chunks


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answering(200, WEIGHTS), "answered 200, expected 206: it ignores ranges and would send the whole file"),
        (answering(204, b"", Content_Length=None), "answered 204, expected 206"),
        (answering(304, b"", Content_Length=None), "answered 304, expected 206"),
        (answering(403), "answered 403, expected 206"),
        (answering(404), "answered 404, expected 206"),
        (answering(416), "answered 416: the file ends before these bytes"),
        (answering(Content_Range=None), "Content-Range '', expected 'bytes 200000-204999/262144'"),
        (answering(Content_Range="bytes 0-4999/262144"), "Content-Range 'bytes 0-4999/262144', expected"),
        (answering(Content_Range="bytes 200000-205000/262144"), "Content-Range 'bytes 200000-205000/262144', exp"),
        (answering(Content_Range="bytes 200000-204999/*"), "Content-Range 'bytes 200000-204999/*', expected"),
        (
            answering(Content_Range="bytes 200000-204999/262145"),
            "the file has 262145 bytes at 127.0.0.1, expected 262144",
        ),
        (answering(Content_Range="x" * 500), "Content-Range of 500 characters, expected"),
        (answering(Content_Encoding="gzip"), "content encoding 'gzip', expected the bytes themselves"),
        (answering(Content_Type="multipart/byteranges; boundary=x"), "several parts, expected one range"),
        (answering(body=WEIGHTS[:5001]), "announced a body of '5001' bytes, expected 5000"),
        (answering(body=WEIGHTS[:4999]), "announced a body of '4999' bytes, expected 5000"),
        (chunked(WEIGHTS[:4000], WEIGHTS[:4000]), "sent more than 5000 bytes"),
    ],
)
def test_an_answer_that_is_not_the_range_is_refused_and_not_asked_for_again(
    hub: LoopbackHub, open_hub: OpenHub, waits: list[float], fault: Fault, said: str
) -> None:
    hub.faults["cdn"] = itertools.repeat(fault)
    repository = open_hub()
    message = failure(lambda: read_weights(repository))
    assert message.startswith(f"org/name@{COMMIT[:12]}: model.safetensors: bytes 200000-204999: ")
    assert said in message
    assert len(hub.of_kind("cdn")) == 1
    assert not waits


def test_the_body_of_a_server_that_ignores_ranges_is_not_downloaded(hub: LoopbackHub, open_hub: OpenHub) -> None:
    ended = threading.Event()

    def endless(answer: Answer) -> None:
        try:
            answer.send(200, headers={"Content-Length": str(1 << 40)})
            while not answer.hub.ending.is_set():
                answer.handler.wfile.write(bytes(1 << 16))
        except OSError:
            ended.set()
            raise

    hub.faults["cdn"] = iter([endless])
    repository = open_hub()
    assert "ignores ranges" in failure(lambda: read_weights(repository))
    assert ended.wait(5), "the connection was left open"


# --- redirects ------------------------------------------------------------------------------------------------------


def test_a_redirect_without_an_end_is_left(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.faults["resolve"] = itertools.repeat(lambda answer: answer.send(302, b"", {"Location": answer.handler.path}))
    repository = open_hub()
    assert "redirected more than 5 times" in failure(lambda: repository.read("config.json"))
    assert len(hub.of_kind("resolve")) == 6


@pytest.mark.parametrize(
    ("location", "said"),
    [
        (None, "without saying where to"),
        ("http://[::1", "without saying where to"),
        ("file:///etc/passwd", "something other than a plain web address"),
        ("ftp://127.0.0.1/", "something other than a plain web address"),
        ("http://user:password@127.0.0.1/", "something other than a plain web address"),
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
    got = hub_module._redirect(httpx2.URL(source), response)
    assert isinstance(got, httpx2.URL) is followed
    if isinstance(got, hub_module._Failure):
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

    assert (hub_module._origin(httpx2.URL(one)) == hub_module._origin(httpx2.URL(other))) is same


# --- failures that may pass -----------------------------------------------------------------------------------------


def half_then_reset(answer: Answer) -> None:
    answer.send(206, answer.body[: len(answer.body) // 2], {"Content-Length": str(len(answer.body))})
    answer.reset()


def half_then_end(answer: Answer) -> None:
    answer.send(206, answer.body[: len(answer.body) // 2], {"Content-Length": None, "Connection": "close"})
    answer.handler.close_connection = True


def half_then_nothing(answer: Answer) -> None:
    answer.send(206, answer.body[: len(answer.body) // 2], {"Content-Length": str(len(answer.body))})
    answer.wait_for_the_end()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answering(500), "answered 500"),
        (answering(503), "answered 503"),
        (answering(408), "answered 408"),
        (answering(429), "answered 429: too many requests"),
        (Answer.reset, "broke off its answer"),
        (half_then_reset, "broke off its answer"),
        (half_then_end, "sent 2500 bytes, expected 5000"),
        (chunked(b"x" * 100), "sent 100 bytes, expected 5000"),
    ],
)
def test_a_failure_that_may_pass_is_asked_for_again_and_then_reported(
    hub: LoopbackHub, open_hub: OpenHub, waits: list[float], fault: Fault, said: str
) -> None:
    repository = open_hub()
    hub.faults["cdn"] = iter([fault])
    assert read_weights(repository) == WEIGHTS[200_000:205_000]
    assert len(waits) == 1

    waits.clear()
    hub.faults["cdn"] = itertools.repeat(fault)
    message = failure(lambda: read_weights(repository))
    assert said in message
    assert "(attempts: 4)" in message
    assert len(waits) == 3


@pytest.mark.parametrize("fault", [half_then_nothing, Answer.wait_for_the_end])
def test_a_server_that_stalls_is_asked_again_and_then_reported(
    hub: LoopbackHub, open_hub: OpenHub, waits: list[float], fault: Fault
) -> None:
    repository = open_hub(patience=Patience(read=0.25, attempts=2, sleep=waits.append))
    hub.faults["cdn"] = iter([fault])
    assert read_weights(repository) == WEIGHTS[200_000:205_000]
    assert len(waits) == 1
    hub.faults["cdn"] = itertools.repeat(fault)
    assert "127.0.0.1 sent nothing for 0.25 s (attempts: 2)" in failure(lambda: read_weights(repository))


def test_the_waits_double_and_are_never_quite_the_same(hub: LoopbackHub, open_hub: OpenHub, waits: list[float]) -> None:
    hub.faults["resolve"] = iter([answering(503)] * 3)
    assert open_hub().read("config.json") == CONFIG
    for wait, least in zip(waits, (1, 2, 4), strict=True):
        assert least < wait <= 1.25 * least


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"Retry-After": "7"}, 7, 8.75),
        ({"Retry-After": "0"}, 0, 0),
        ({"Retry-After": "86400"}, 60, 60),
        ({"Retry-After": email.utils.formatdate(time.time() + 40, usegmt=True)}, 20, 50),
        ({"Retry-After": email.utils.formatdate(0, usegmt=True)}, 0, 0),
        ({"Retry-After": "soon"}, 1, 1.25),
        ({"RateLimit": '"resolvers";r=0;t=12'}, 12, 15),
    ],
)
def test_a_server_may_say_when_to_come_back_within_bounds(
    hub: LoopbackHub, open_hub: OpenHub, waits: list[float], headers: dict[str, str], least: float, most: float
) -> None:
    hub.faults["api"] = iter([lambda answer: answer.send(429, b"", dict(headers))])
    assert open_hub().commit == COMMIT
    assert len(waits) == 1
    assert least <= waits[0] <= most


def drip_body(answer: Answer) -> None:
    answer.send(200 if answer.kind == "api" else 206, b"", {"Content-Length": str(len(answer.body))})
    answer.drip(answer.body[index : index + 1] for index in range(len(answer.body) - 1))


def drip_headers(answer: Answer) -> None:
    answer.handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nX-Long: ")
    answer.drip(itertools.repeat(b"x"))


def drip_interim_answers(answer: Answer) -> None:
    answer.drip(itertools.repeat(b"HTTP/1.1 103 Early Hints\r\n\r\n"))


@pytest.mark.parametrize("fault", [drip_body, drip_headers, drip_interim_answers])
@pytest.mark.parametrize("kind", ["api", "resolve", "cdn"])
def test_a_server_that_drips_is_left_at_the_deadline(
    hub: LoopbackHub, open_hub: OpenHub, waits: list[float], kind: str, fault: Fault
) -> None:
    hub.faults[kind] = itertools.repeat(fault)
    hasty = Patience(read=5, deadline=0.2, slowest=1e9, sleep=waits.append)
    message = failure(lambda: read_weights(open_hub(patience=hasty)))
    assert "127.0.0.1 was still answering after 0.2 s" in message
    assert hub.dripped > 2
    assert not waits


def test_the_deadline_holds_on_a_connection_that_is_used_again(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub(patience=Patience(read=5, deadline=0.2, slowest=1e9))
    repository.read("config.json")
    hub.faults["resolve"] = iter([drip_headers])
    assert "was still answering" in failure(lambda: repository.read("config.json"))
    assert repository.read("config.json") == CONFIG


def test_a_connection_that_is_made_when_the_deadline_has_passed_is_shut() -> None:
    class Stream:
        def get_extra_info(self, name: str) -> socket.socket:
            return ours

    ours, theirs = socket.socketpair()
    with ours, theirs, hub_module._Deadline(0.01, []) as deadline:
        while not deadline.passed:
            time.sleep(0.005)
        deadline.trace("connection.connect_tcp.complete", {"return_value": Stream()})
        theirs.settimeout(5)
        assert theirs.recv(1) == b""


# --- a Hub that says no, or says nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, False])
def test_a_repository_that_is_not_there_or_not_shown_is_no_checkpoint(open_hub: OpenHub, token: str | bool) -> None:
    message = failure(lambda: open_hub("org/other", token=token), NoCheckpointError)
    status = 404 if token else 401
    assert message == (
        f"org/other: not found or no access ({status}) (help: check the name, or log in with `hf auth login`)"
    )


def test_a_revision_that_is_not_there_is_no_checkpoint(open_hub: OpenHub) -> None:
    message = failure(lambda: open_hub(f"org/name@{COMMIT[:7]}"), NoCheckpointError)
    assert message.startswith(f"org/name@{COMMIT[:7]}: the repository has no such revision")
    assert "all of its 40 digits" in message


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answering(401, X_Error_Code="GatedRepo"), "gated, and no access was granted (401) (help: accept its terms"),
        (answering(403, X_Error_Code="GatedRepo"), "gated, and no access was granted (403) (help: accept its terms"),
        (answering(401), "the token was refused (401) (help: check the name, and log in again"),
        (answering(403), "not found or no access (403)"),
        (answering(404), "not found or no access (404)"),
    ],
)
def test_a_refusal_says_what_would_help(hub: LoopbackHub, open_hub: OpenHub, fault: Fault, said: str) -> None:
    hub.faults["api"] = iter([fault])
    assert said in failure(open_hub, NoCheckpointError)
    hub.faults["resolve"] = iter([fault])  # as for a gated repository, which lists its files to everyone
    repository = open_hub()
    assert said in failure(lambda: repository.read("config.json"))


def test_a_file_that_went_away_is_an_error(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub()
    del hub.commits[COMMIT]["config.json"]
    assert "config.json: bytes 0-28: the file is not there (404)" in failure(lambda: repository.read("config.json"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answering(503), "answered 503 (attempts: 4)"),
        (Answer.reset, "broke off its answer"),
        (answering(400), "answered 400"),
        (answering(200, b"not gzip", Content_Encoding="gzip"), "an answer that cannot be decoded"),
        (lambda answer: answer.handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "broke off its answer"),
    ],
)
def test_a_listing_that_does_not_come_is_an_error(hub: LoopbackHub, open_hub: OpenHub, fault: Fault, said: str) -> None:
    hub.faults["api"] = itertools.repeat(fault)
    message = failure(open_hub)
    assert message.startswith("org/name: 127.0.0.1 ")
    assert said in message


def test_a_listing_that_broke_off_is_asked_for_from_its_start(hub: LoopbackHub, open_hub: OpenHub) -> None:
    def half(answer: Answer) -> None:
        answer.send(200, answer.body[:50], {"Content-Length": str(len(answer.body))})
        answer.handler.close_connection = True

    hub.faults["api"] = iter([half])
    assert open_hub().commit == COMMIT


def test_a_listing_that_stalls_is_an_error(hub: LoopbackHub, open_hub: OpenHub) -> None:
    hub.faults["api"] = itertools.repeat(Answer.wait_for_the_end)
    message = failure(lambda: open_hub(patience=Patience(read=0.25, attempts=1)))
    assert message.startswith("org/name: 127.0.0.1 sent nothing for 0.25 s (attempts: 1)")


def nobody_listens() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_hub_that_refuses_the_connection_could_not_be_reached(open_hub: OpenHub, waits: list[float]) -> None:
    message = failure(lambda: open_hub(endpoint=nobody_listens()))
    assert message.startswith(
        "org/name: could not reach 127.0.0.1 (Connection refused) (attempts: 2) (help: check the n"
    )
    assert len(waits) == 1, "without a network, an answer is due soon"


def test_a_hub_whose_name_is_not_known_could_not_be_reached(open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    message = failure(lambda: open_hub(endpoint="http://hub.invalid"))
    assert "could not reach hub.invalid (Name or service not known)" in message


def test_a_hub_that_does_not_speak_tls_could_not_be_reached(hub: LoopbackHub, open_hub: OpenHub) -> None:
    assert "could not reach 127.0.0.1" in failure(lambda: open_hub(endpoint=hub.endpoint.replace("http:", "https:")))


def test_offline_mode_is_said_and_nothing_is_requested(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in failure(open_hub)
    assert not hub.requests


def test_a_proxy_that_cannot_be_one_is_named_without_its_password(
    open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://user:password@proxy")
    monkeypatch.setenv("all_proxy", "gopher://user:password@proxy")
    message = failure(open_hub)
    assert "no HTTP client could be set up" in message
    assert "password" not in message


def test_an_interrupted_read_leaves_the_repository_usable(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = open_hub()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub_module._Connection, "get", interrupt)
        repository.read("config.json")
    assert repository.read("config.json") == CONFIG


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


# --- what is no name ------------------------------------------------------------------------------------------------


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


# --- in a process of its own ----------------------------------------------------------------------------------------


def run_python(program: str, home: Path, **environment: str) -> str:
    """What `program` prints, with nothing of this process's Hugging Face settings, in an empty directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    source = str(Path(bowline.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-B", "-c", program],
        env=kept | {"PYTHONPATH": source, "HF_HOME": str(home), "HOME": str(home)} | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


READ_ALL = """
from bowline.checkpoint.hub import HubRepository
with HubRepository.open_repository("org/name") as files:
    print({name: len(files.read(name)) for name in files.sizes()})
"""


def test_a_whole_run_follows_the_environment_and_writes_nothing_to_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    printed = run_python(READ_ALL, home, HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN)
    assert printed == "{'config.json': 29, 'empty.txt': 0, 'model.safetensors': 262144}"
    assert list(home.iterdir()) == []
    assert [request.kind for request in hub.requests] == ["api", "resolve", "resolve", "cdn"]
    assert hub.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_importing_the_module_imports_no_http_client(tmp_path: Path) -> None:
    program = (
        "import bowline.checkpoint.hub, sys; print([m for m in ('huggingface_hub', 'httpx2') if m in sys.modules])"
    )
    assert run_python(program, tmp_path) == "[]"
