"""A request with a temporary failure is repeated, with limits on number and delay."""

from __future__ import annotations

import email.utils
import itertools
import time

import pytest

from bowline.checkpoint.places.hub import Patience
from bowline.checkpoint.places.hub.connection import Connection
from tests.checkpoint.loopback_hub import Answer, Fault, LoopbackHub
from tests.checkpoint.places.hub.asking import (
    COMMIT,
    CONFIG,
    WEIGHTS,
    OpenHub,
    answering,
    chunked,
    failure,
    read_weights,
)


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
        (Answer.reset, "closed the connection during its answer"),
        (half_then_reset, "closed the connection during its answer"),
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


def test_a_server_may_name_the_hour_to_come_back(hub: LoopbackHub, open_hub: OpenHub, waits: list[float]) -> None:
    soon = email.utils.formatdate(time.time() + 40, usegmt=True)
    hub.faults["api"] = iter([lambda answer: answer.send(429, b"", {"Retry-After": soon})])
    assert open_hub().commit == COMMIT
    assert 20 <= waits[0] <= 50


def test_an_interrupted_read_leaves_the_repository_usable(
    hub: LoopbackHub, open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = open_hub()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Connection, "get", interrupt)
        repository.read("config.json")
    assert repository.read("config.json") == CONFIG


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt
