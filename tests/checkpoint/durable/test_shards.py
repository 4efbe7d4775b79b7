"""Shards are the files that safetensors, huggingface_hub and transformers write, without copying tensors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from huggingface_hub import split_state_dict_into_shards_factory, split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from bowline.checkpoint import LintKind, open_checkpoint
from bowline.checkpoint.durable.shards import Payload, parse_size, split, write_shards
from bowline.errors import CheckpointError, UsageError
from tests.checkpoint.formats.test_numpy_writer import ARRAYS, NAMES
from tests.checkpoints import snapshot

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
}
INDEX = "model.safetensors.index.json"


def payload(name: str, tensor: torch.Tensor) -> Payload:
    """The tensor's own memory."""
    return Payload(
        name=name,
        dtype=DTYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        data=lambda: tensor.detach().reshape(-1).view(torch.uint8).numpy(),
    )


def zeros(name: str, size: int) -> Payload:
    return Payload(name=name, dtype="U8", shape=(size,), data=lambda: bytes(size))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5GB", "1.5MB", "0.5 kb", " 2TB ", "1e3KB", "50gb"])
def test_a_size_means_what_huggingface_hub_takes_it_for(size: str) -> None:
    from huggingface_hub.serialization._base import parse_size_to_int

    assert parse_size(size) == parse_size_to_int(size)


@pytest.mark.parametrize(
    "size", ["", "5", "GB", "5GiB", "5 B", "-1GB", "0KB", "nanGB", "infGB", "1e400GB", "a lot", 0, -1]
)
def test_a_size_that_means_nothing_is_a_usage_error(size: str | int) -> None:
    with pytest.raises(
        UsageError,
        match=r"max_shard_size=.*: expected a positive .* \(help: for example \"5GB\", or 1024 without quotes",
    ):
        parse_size(size)


@settings(max_examples=300)
@given(sizes=st.lists(st.integers(0, 20), max_size=30), limit=st.integers(1, 20))
def test_tensors_are_split_as_huggingface_hub_splits_them(sizes: list[int], limit: int) -> None:
    named = {f"t{at}": size for at, size in enumerate(sizes)}
    theirs = split_state_dict_into_shards_factory(
        named, get_storage_size=lambda size: size, filename_pattern="m{suffix}", max_shard_size=limit
    )
    assert split(named, limit) == list(theirs.filename_to_tensors.values())


# --- one file -------------------------------------------------------------------------------------------------------


def each_dtype() -> Iterable[tuple[str, torch.Tensor]]:
    for dtype, name in DTYPES.items():
        for shape in [(), (0,), (3, 0, 2), (1,), (5, 3)]:
            values = torch.arange(15)[: max(1, int(np.prod(shape)))] if 0 not in shape else torch.zeros(0)
            yield f"{name}{list(shape)}é", values.to(torch.float32).to(dtype).reshape(shape)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "np"}, {'a "key"': "zwölf\n"}])
def test_a_file_is_the_one_that_safetensors_writes_for_torch(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = dict(each_dtype())
    files = write_shards(
        tmp_path, [payload(*item) for item in tensors.items()], max_shard_size="5GB", metadata=metadata
    )
    assert files == ("model.safetensors",)
    theirs = safetensors.torch.save(tensors, {"format": "pt"} if metadata is None else metadata)
    assert (tmp_path / "model.safetensors").read_bytes() == theirs


@settings(max_examples=50)
@given(tensors=st.dictionaries(NAMES, ARRAYS, max_size=5))
def test_a_file_is_the_one_that_safetensors_writes_for_numpy(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("written")
    codes = {"f": "F", "i": "I", "u": "U", "c": "C"}

    def announced(name: str, array: Any) -> Payload:
        dtype = "BOOL" if array.dtype.kind == "b" else f"{codes[array.dtype.kind]}{array.dtype.itemsize * 8}"
        return Payload(name=name, dtype=dtype, shape=array.shape, data=lambda: np.ascontiguousarray(array))

    write_shards(directory, [announced(*item) for item in tensors.items()], max_shard_size="5GB")
    assert (directory / "model.safetensors").read_bytes() == safetensors.numpy.save(tensors, {"format": "pt"})


def test_the_data_of_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    alive: list[int] = []

    class Late(bytearray):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            alive.append(size)

        def __del__(self) -> None:
            alive.remove(len(self))

    def late(size: int) -> Callable[[], Late]:
        def data() -> Late:
            assert alive == []
            return Late(size)

        return data

    payloads = [Payload(name=f"t{size}", dtype="U8", shape=(size,), data=late(size)) for size in range(1, 9)]
    assert len(write_shards(tmp_path, payloads, max_shard_size=10)) == 6
    assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts anonymous memory on Linux alone")
def test_200_mb_are_written_where_a_copy_of_them_would_not_fit(tmp_path: Path) -> None:
    script = f"""
import mmap, os, resource
from pathlib import Path
from bowline.checkpoint.durable.shards import Payload, write_shards
size = 200 << 20
root = Path({str(tmp_path)!r})
descriptor = os.open(root / "weights", os.O_RDWR | os.O_CREAT)
os.truncate(descriptor, size)
weights = mmap.mmap(descriptor, size)
weights[:5], weights[-5:] = b"begin", b"  end"
tensor = Payload(name="t", dtype="BF16", shape=(100, 1 << 20), data=lambda: memoryview(weights))
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (16 << 20), resource.RLIM_INFINITY))
try:
    bytes(size)
except MemoryError:
    write_shards(root, [tensor], max_shard_size="5GB")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["t"].shape == (100, 1 << 20)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        assert os.fstat(file.fileno()).st_size == header + (200 << 20)
        file.seek(header)
        assert file.read(5) == b"begin"
        file.seek(-5, os.SEEK_END)
        assert file.read() == b"  end"


# --- several files --------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=3, n_head=2))


@pytest.mark.parametrize("limit", ["1KB", "5KB", "13KB", "5GB"])
def test_the_files_are_those_that_save_pretrained_writes(tmp_path: Path, model: GPT2LMHeadModel, limit: str) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    model.save_pretrained(theirs, max_shard_size=limit)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    files = write_shards(ours, [payload(*item) for item in state.items()], max_shard_size=limit)
    assert sorted(files) == names(ours)
    for name in names(ours):
        if name == INDEX:
            expected = json.loads((theirs / name).read_bytes())
            del expected["metadata"]["total_parameters"]  # a count of the model's, which its tensors do not give
            assert (ours / name).read_text() == json.dumps(expected, indent=2, sort_keys=True) + "\n"
        else:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert set(names(theirs)) - set(names(ours)) <= {"config.json", "generation_config.json"}
    assert (INDEX in files) == (limit != "5GB")


def test_the_index_holds_what_huggingface_hub_counts(tmp_path: Path, model: GPT2LMHeadModel) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_shards(tmp_path, [payload(*item) for item in state.items()], max_shard_size=9_000)
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=9_000)
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index == {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
    with open_checkpoint(tmp_path) as checkpoint:
        assert {lint.kind for lint in checkpoint.lints} == {LintKind.CONFIG_MISSING}
        assert set(checkpoint.tensors) == set(state)


def test_a_model_without_tensors_is_a_file_without_tensors(tmp_path: Path) -> None:
    assert write_shards(tmp_path, [], max_shard_size="5GB") == ("model.safetensors",)
    assert (tmp_path / "model.safetensors").read_bytes() == safetensors.torch.save({}, {"format": "pt"})


def test_every_file_is_synchronised_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: dict[str, int] = {}

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synchronised[path.name] = path.stat().st_size

    monkeypatch.setattr(os, "fsync", fsync)
    files = write_shards(tmp_path, [zeros("a", 8), zeros("b", 8)], max_shard_size=8)
    assert synchronised == {name: (tmp_path / name).stat().st_size for name in files}


# --- what is refused ------------------------------------------------------------------------------------------------


def bad(**changed: Any) -> list[Payload]:
    return [zeros("a", 8), Payload(**{"name": "t", "dtype": "U8", "shape": (8,), "data": lambda: bytes(8), **changed})]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "BF17"}, "t: dtype 'BF17', expected one of BOOL"),
        ({"dtype": "float32"}, "t: dtype 'float32'"),
        ({"dtype": "F4", "shape": (3,)}, r"t: F4 of shape \[3\], expected elements that fill whole bytes"),
        ({"shape": (-2, -4)}, r"t: U8 of shape \[-2, -4\]"),
        ({"shape": (9,)}, r"t: 8 bytes for U8 of shape \[9\], expected 9"),
        ({"data": lambda: memoryview(bytes(16))[::2]}, "expected 8 contiguous ones"),
        ({"name": "a"}, "a: two tensors have this name"),
        ({"name": "__metadata__"}, "__metadata__: this name is taken"),
    ],
)
@pytest.mark.parametrize("limit", [8, 100])
def test_a_tensor_that_contradicts_itself_is_a_usage_error_and_leaves_no_file(
    tmp_path: Path, changed: dict[str, Any], message: str, limit: int
) -> None:
    with pytest.raises(UsageError, match=message):
        write_shards(tmp_path, bad(**changed), max_shard_size=limit)
    assert names(tmp_path) == []


@pytest.mark.parametrize("link", [True, False])
def test_a_file_that_is_there_is_not_overwritten_nor_written_through(tmp_path: Path, link: bool) -> None:
    directory, blob = tmp_path / "model", tmp_path / "blob"
    directory.mkdir()
    blob.write_bytes(b"of a cache")
    second = directory / "model-00002-of-00002.safetensors"
    if link:
        second.symlink_to(blob)
    else:
        second.write_bytes(b"of another model")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: cannot be written: File exists"):
        write_shards(directory, [zeros("a", 8), zeros("b", 8)], max_shard_size=8)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_is_a_checkpoint_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device \(help: free space"):
        write_shards(tmp_path, [zeros("a", 8), zeros("b", 8)], max_shard_size=8)
    assert names(tmp_path) == []


def test_an_error_of_the_one_who_gives_the_data_comes_through_and_leaves_no_file(tmp_path: Path) -> None:
    def data() -> bytes:
        raise RuntimeError("out of memory on the accelerator")

    with pytest.raises(RuntimeError, match="accelerator"):
        write_shards(tmp_path, bad(data=data), max_shard_size=8)
    assert names(tmp_path) == []
