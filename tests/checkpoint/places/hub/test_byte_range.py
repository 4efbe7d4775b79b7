"""An answer that is not the range that was asked for is refused at once."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.checkpoint.loopback_hub import Answer, Fault, LoopbackHub
from tests.checkpoint.places.hub.asking import COMMIT, WEIGHTS, OpenHub, answering, chunked, failure, read_weights


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
            "the file has 262145 bytes at 127.0.0.1, but 262144 in the Hub's listing",
        ),
        (answering(Content_Range="x" * 500), "Content-Range (500 characters), expected"),
        (answering(Content_Encoding="gzip"), "content encoding 'gzip', expected unencoded bytes"),
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
    assert message.startswith(f"org/name@{COMMIT}: model.safetensors: bytes 200000-204999: ")
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
