"""A request to a slow server ends at its deadline."""

from __future__ import annotations

import itertools
import socket
import time

import pytest

from bowline.checkpoint.places.hub import Patience
from bowline.checkpoint.places.hub.time_limits import Deadline
from tests.checkpoint.loopback_hub import Answer, Fault, LoopbackHub
from tests.checkpoint.places.hub.asking import CONFIG, OpenHub, failure, read_weights


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
    assert "127.0.0.1 had not finished its answer after 0.2 s" in message
    assert hub.dripped > 2
    assert not waits


def test_the_deadline_holds_on_a_connection_that_is_used_again(hub: LoopbackHub, open_hub: OpenHub) -> None:
    repository = open_hub(patience=Patience(read=5, deadline=0.2, slowest=1e9))
    repository.read("config.json")
    hub.faults["resolve"] = iter([drip_headers])
    assert "had not finished its answer" in failure(lambda: repository.read("config.json"))
    assert repository.read("config.json") == CONFIG


def test_a_connection_that_is_made_when_the_deadline_has_passed_is_shut() -> None:
    class Stream:
        def get_extra_info(self, name: str) -> socket.socket:
            return ours

    ours, theirs = socket.socketpair()
    with ours, theirs, Deadline(0.01, []) as deadline:
        while not deadline.passed:
            time.sleep(0.005)
        deadline.trace("connection.connect_tcp.complete", {"return_value": Stream()})
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
