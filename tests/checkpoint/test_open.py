"""`open_checkpoint`: the places that it accepts, and the values that it reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint import Checkpoint, open_checkpoint
from bowline.checkpoint.formats.numpy_writer import Bits
from bowline.checkpoint.places.byte_source import ByteSource, MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, FormatError, NoCheckpointError, RemoteError, UsageError
from tests.checkpoint.pickled import dictionary, saved, tensor
from tests.checkpoints import GPT2, OWN, WTE, bf16, shards, table, tied_gpt2, write


class Memory(FileSet):
    """Files in memory."""

    location = "memory"

    def __init__(self, **files: bytes) -> None:
        self.files = {name.replace("_json", ".json"): content for name, content in files.items()}
        self.closed = 0

    def sizes(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    def open(self, name: str) -> ByteSource:
        return MemoryBytes(name, self.files[name])

    def close(self) -> None:
        self.closed += 1


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "model.safetensors", "config.json"])
def test_a_directory_one_of_its_files_and_its_config_are_the_same_model(tmp_path: Path, inside: str) -> None:
    with open_checkpoint(tied_gpt2(tmp_path) / inside) as checkpoint:
        assert list(checkpoint.tensors) == [WTE]
        assert checkpoint.config == GPT2


def test_an_index_is_a_place(tmp_path: Path) -> None:
    path = shards(tmp_path, {"model-00001-of-00001.safetensors": {WTE: table()}})
    with open_checkpoint(path / "model.safetensors.index.json") as checkpoint:
        assert list(checkpoint.tensors) == [WTE]


def test_the_location_is_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied_gpt2(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for place in ("model", "model/model.safetensors"):
        with open_checkpoint(place) as checkpoint:
            assert checkpoint.location == place


def test_what_is_on_disk_comes_before_what_is_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied_gpt2(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("org/name") as checkpoint:
        assert list(checkpoint.tensors) == [WTE]


@pytest.mark.parametrize(
    "place", ["/no/such/place", "./gone", "gone.safetensors", "a b", "a/b/c", "", "a\0b", "org/name/"]
)
def test_a_place_that_is_not_there_is_an_error_and_never_the_network(place: str) -> None:
    with pytest.raises((NoCheckpointError, UsageError)) as caught:
        open_checkpoint(place)
    assert caught.value.help


@pytest.mark.parametrize("name", ["my-model", "my/model", "my..model"])
@pytest.mark.parametrize("offline", [True, False], ids=["offline", "unreachable"])
def test_a_path_that_was_mistyped_and_looks_like_a_name_on_the_hub_is_said_not_to_be_here(
    monkeypatch: pytest.MonkeyPatch, name: str, offline: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    kind = UsageError if ".." in name else RemoteError
    with pytest.raises(kind, match=f"{re.escape(name)}.*; and no local path has this name"):
        open_checkpoint(name)


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "loop"])
def test_a_file_that_is_no_model_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(NoCheckpointError, match="expected a directory"):
        open_checkpoint(tmp_path / name)


def test_a_link_into_a_folder_that_may_not_be_searched_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("somewhere")

    def refuse(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "link")


def test_a_checkpoint_that_cannot_be_read_lets_go_of_its_files() -> None:
    files = Memory()
    with pytest.raises(NoCheckpointError):
        Checkpoint(files)
    assert files.closed == 1


@pytest.mark.parametrize("inside", ["", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_told_with_its_checkpoint(tmp_path: Path, inside: str) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FormatError, match=f"^{re.escape(str(tmp_path))}[:/] ?model.safetensors: 0 bytes"):
        open_checkpoint(tmp_path / inside)


# --- values ---------------------------------------------------------------------------------------------------------

EVERY_DTYPE: dict[str, Any] = {
    "F64": np.array([[1.5, -0.0], [np.inf, 1e-300]]),
    "F32": np.array([[1.5, -0.0], [np.inf, 1e-40]], np.float32),
    "F16": np.array([[1.5, -0.0], [65504, 6e-8]], np.float16),
    "I64": np.array([[1, -2], [2**62, 3]]),
    "U8": np.array([[0, 255], [1, 2]], np.uint8),
    "BOOL": np.array([[True, False], [False, True]]),
}


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_rows_are_what_was_written_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    values = EVERY_DTYPE[dtype]
    with open_checkpoint(write(tmp_path, {"t": values})) as checkpoint:
        rows = checkpoint.rows("t")
        assert checkpoint.tensors["t"].dtype == dtype
        assert rows.dtype == values.dtype
        assert rows.tobytes() == values.tobytes()
        assert checkpoint.rows("t", 1).tobytes() == values[1:].tobytes()


def test_bf16_comes_as_the_float32_that_it_is(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {"t": bf16(table())})) as checkpoint:
        expected = (table().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        assert np.array_equal(checkpoint.rows("t"), expected)


@settings(max_examples=30)
@given(rows=st.integers(0, 9), columns=st.integers(0, 5), block=st.integers(1, 80))
def test_blocks_are_the_rows_in_order_whatever_their_size(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, block: int
) -> None:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    with open_checkpoint(write(tmp_path_factory.mktemp("c"), {"t": values})) as checkpoint:
        parts = list(checkpoint.blocks("t", block))
        assert [start for start, _ in parts] == [int(s) for s in np.cumsum([0, *map(len, (p for _, p in parts))])[:-1]]
        assert all(part.nbytes <= max(block, columns * 4) for _, part in parts)
        joined = np.concatenate([np.empty((0, columns), np.float32), *(part for _, part in parts)])
        assert np.array_equal(joined, values)


def test_a_scalar_is_one_row(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {"t": np.float32(7) * np.ones((), np.float32)})) as checkpoint:
        assert checkpoint.rows("t") == 7
        assert [part.shape for _, part in checkpoint.blocks("t")] == [()]


def test_a_view_of_a_pickle_is_read_through_its_strides(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(
        saved(dictionary({"t": tensor((3, 2), (1, 3)), "e": tensor((4, 3), (0, 1))}))
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.rows("t").tolist() == [[0, 3], [1, 4], [2, 5]]
        assert checkpoint.rows("t", 1, 2).tolist() == [[1, 4]]
        assert checkpoint.rows("t", 1, 1).shape == (0, 2)
        assert checkpoint.rows("e", 2).tolist() == [[0, 1, 2], [0, 1, 2]]
        with pytest.raises(FormatError, match="stored with strides"):
            checkpoint.read_rows_into("t", 0, memoryview(bytearray(4)))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 65), (3, 2), (65, None)])
def test_rows_that_a_tensor_does_not_have_are_a_usage_error(tmp_path: Path, start: int, stop: int | None) -> None:
    with open_checkpoint(tied_gpt2(tmp_path)) as checkpoint, pytest.raises(UsageError, match="it has 64"):
        checkpoint.rows(WTE, start, stop)


def test_a_name_that_is_not_stored_is_a_usage_error(tmp_path: Path) -> None:
    with open_checkpoint(tied_gpt2(tmp_path)) as checkpoint, pytest.raises(UsageError, match="no tensor 'gone'"):
        checkpoint.rows("gone")


def test_a_buffer_longer_than_the_tensor_is_a_usage_error(tmp_path: Path) -> None:
    with open_checkpoint(tied_gpt2(tmp_path)) as checkpoint, pytest.raises(UsageError, match="33 bytes from row 63"):
        checkpoint.read_rows_into(WTE, 63, memoryview(bytearray(33)))


def test_rows_that_end_within_a_byte_are_refused(tmp_path: Path) -> None:
    text = b'{"t":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(FormatError, match="a row has 12 bits"):
        list(checkpoint.blocks("t"))


def test_a_disk_that_returns_short_reads_gives_the_right_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
    with open_checkpoint(write(tmp_path, {WTE: OWN}, GPT2)) as checkpoint:
        assert np.array_equal(checkpoint.rows(WTE), OWN)


def test_a_file_that_shrank_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    with open_checkpoint(tied_gpt2(tmp_path)) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(FormatError, match="but the file has 1000"):
            checkpoint.rows(WTE)


def test_json_that_is_not_there_is_none_and_bad_json_is_an_error(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {WTE: table()}, GPT2, files={"broken": "{"})) as checkpoint:
        assert checkpoint.json("gone.json") is None
        with pytest.raises(FormatError, match=r"broken\.json: not JSON"):
            checkpoint.json("broken.json")


def test_bits_have_to_be_as_wide_as_their_dtype() -> None:
    with pytest.raises(UsageError, match="the bit patterns for BF16 are uint8"):
        Bits("BF16", np.zeros(2, np.uint8))
