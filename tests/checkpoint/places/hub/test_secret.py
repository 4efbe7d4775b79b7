"""The token goes to the Hub, and nowhere else."""

from __future__ import annotations

import itertools

import pytest

from bowline.errors import UsageError
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import COMMIT, CONFIG, TOKEN, OpenHub, answering, failure, read_weights


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
    assert "is not valid HTTP" in failure(lambda: open_hub(token=f"{TOKEN}\nX-Other: 1"))


@pytest.mark.parametrize("name", ["Content-Range", "Content-Encoding", "Content-Length", "Location"])
def test_a_token_that_the_server_echoes_is_not_shown(hub: LoopbackHub, open_hub: OpenHub, name: str) -> None:
    status = 302 if name == "Location" else 206
    hub.faults["resolve"] = itertools.repeat(lambda answer: answer.send(status, headers={name: f"http://{TOKEN}/"}))
    repository = open_hub()
    failure(lambda: repository.read("config.json"))


def test_nothing_that_is_shown_shows_the_token(open_hub: OpenHub) -> None:
    repository = open_hub()
    file = repository.open("config.json")
    assert repr(repository) == f"HubRepository('org/name@{COMMIT}')"
    assert repr(file) == f"RemoteFile('config.json', 29 bytes, 'org/name@{COMMIT}')"
    assert TOKEN not in repr((vars(repository), vars(file), vars(vars(repository)["_hub"])))
