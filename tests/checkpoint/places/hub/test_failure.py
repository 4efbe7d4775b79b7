"""The errors for a Hub that refuses or does not answer."""

from __future__ import annotations

import itertools
import socket

import pytest

from bowline.checkpoint.places.hub import Patience
from bowline.errors import NoCheckpointError
from tests.checkpoint.loopback_hub import Answer, Fault, LoopbackHub
from tests.checkpoint.places.hub.asking import COMMIT, TOKEN, OpenHub, answering, failure


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
    assert "the full 40-digit commit hash" in message


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
    assert "config.json: bytes 0-28: the file was not found (404)" in failure(lambda: repository.read("config.json"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answering(503), "answered 503 (attempts: 4)"),
        (Answer.reset, "closed the connection during its answer"),
        (answering(400), "answered 400"),
        (answering(200, b"not gzip", Content_Encoding="gzip"), "an answer that cannot be decoded"),
        (
            lambda answer: answer.handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
            "closed the connection during its answer",
        ),
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
