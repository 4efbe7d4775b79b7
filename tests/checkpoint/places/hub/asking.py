"""Helpers for the tests of the Hub: its files, its faults, and secrets that an error must not show."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from bowline.checkpoint.places.hub import HubRepository
from bowline.errors import BowlineError, RemoteError
from tests.checkpoint.loopback_hub import Answer, Fault, commit_of

TOKEN = "hf_thisIsASecretThatNobodyMayRead"
COMMIT = commit_of("first")
CONFIG = b'{"tie_word_embeddings": true}'
WEIGHTS = bytes(range(256)) * 1024  # 256 KiB: more than is read ahead

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


def chunked(*chunks: bytes) -> Fault:
    def answer_in_chunks(answer: Answer) -> None:
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
        answer.send(206, body, {"Content-Length": None, "Transfer-Encoding": "chunked"})

    return answer_in_chunks
