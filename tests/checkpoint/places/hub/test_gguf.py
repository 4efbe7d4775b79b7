"""GGUF files of a repository: by ranges, one of several, and one model in parts."""

from __future__ import annotations

import numpy as np
import pytest

from bowline.checkpoint import open_checkpoint
from bowline.errors import NoCheckpointError
from tests.checkpoint.gguf_files import EMBEDDING, gguf_file, q8_0, vocabulary
from tests.checkpoint.loopback_hub import LoopbackHub, commit_of
from tests.checkpoints import table

TABLE = table(2048, 256)
COMMIT = commit_of("gguf")
MODEL = gguf_file({"first": table(4096, 512), EMBEDDING: q8_0(TABLE)}, vocabulary(20_000))


def hub_with(*names: str) -> LoopbackHub:
    return LoopbackHub(branches={"main": COMMIT}, commits={COMMIT: dict.fromkeys(names, MODEL)})


@pytest.mark.parametrize("place", ["org/name", "org/name/model.gguf", "org/name/model.gguf@main"])
def test_a_gguf_file_is_read_by_ranges(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with hub_with("model.gguf") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with open_checkpoint(place) as checkpoint:
            assert list(checkpoint.tensors) == ["first", EMBEDDING]
            rows = checkpoint.rows(EMBEDDING, 7, 9)
            location = checkpoint.location
    fetched = sum(_length(request.headers["range"]) for request in hub.requests if "range" in request.headers)
    assert fetched < len(MODEL) // 4
    assert np.abs(rows - TABLE[7:9]).max() < 0.05
    assert location == (f"org/name@{COMMIT}" if place == "org/name" else f"org/name/model.gguf@{COMMIT}")


def _length(header: str) -> int:
    first, last = header.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_of_several_files_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with("a.gguf", "sub/b.gguf") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with pytest.raises(NoCheckpointError) as caught:
            open_checkpoint("org/name")
        assert "2 GGUF files, each a model of its own ('a.gguf', 'sub/b.gguf')" in caught.value.message
        assert f"org/name/a.gguf@{COMMIT}" in (caught.value.help or "")
        with open_checkpoint("org/name/sub/b.gguf") as checkpoint:
            assert checkpoint.weight_files == ("sub/b.gguf",)


def test_a_file_that_the_repository_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with("a.gguf") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with pytest.raises(NoCheckpointError, match=r"no file 'b\.gguf'; its GGUF files are: 'a\.gguf'"):
            open_checkpoint("org/name/b.gguf")
