"""The reader of ONNX files: against onnx's own, under damage, and with hostile sizes."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint.formats.graphs.graph_model import GraphModel
from bowline.checkpoint.formats.graphs.uses import find_uses
from bowline.checkpoint.formats.onnx.graph import MOST_DEPTH, read_model
from bowline.checkpoint.formats.onnx.model import read_onnx
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import BowlineError, FormatError
from tests.checkpoint.onnx_files import causal, dequantised, gemm, merged, model, onnx
from tests.checkpoints import table

TABLE, OWN = table(24, 8), table(24, 8, seed=1)
MODELS = {
    "shared": causal(TABLE),
    "own": causal(TABLE, OWN),
    "gemm": gemm(TABLE, OWN),
    "quantised": dequantised(TABLE, OWN),
    "merged": merged(TABLE, OWN, inside=True),
}
NAMES = {name: number for number, name in onnx.TensorProto.DataType.items()}
DTYPES = {"F32": "FLOAT", "F16": "FLOAT16", "I8": "INT8", "I64": "INT64", "BOOL": "BOOL", "F64": "DOUBLE"}


class Memory(FileSet):
    """Files in memory."""

    def __init__(self, **files: bytes) -> None:
        self.location = "memory"
        self.files = {name.replace("__", "."): raw for name, raw in files.items()}

    def sizes(self) -> Mapping[str, int]:
        return {name: len(raw) for name, raw in self.files.items()}

    def open(self, name: str) -> MemoryBytes:
        return MemoryBytes(name, self.files[name])

    def close(self) -> None:
        pass


def read(raw: bytes) -> GraphModel:
    return read_onnx(Memory(model__onnx=raw), "model.onnx")


def refused(raw: bytes) -> str:
    """The message about a file that is refused: one printable line that begins with the file's name, and a way out."""
    with pytest.raises(FormatError) as caught:
        read(raw)
    assert caught.value.message.startswith("model.onnx: ")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400
    assert caught.value.help
    return caught.value.message


def varint(value: int) -> bytes:
    octets = []
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])


def part(number: int, raw: bytes, length: int | None = None) -> bytes:
    """A field of bytes, which may state another length than it has."""
    return varint(number << 3 | 2) + varint(len(raw) if length is None else length) + raw


def whole(graph: bytes) -> bytes:
    """A model with this graph."""
    return b"\x08\x0a" + part(7, graph)


def tensor(*fields: bytes, name: str = "t", dims: tuple[int, ...] = (2,), kind: int = 1) -> bytes:
    """A graph with one initializer."""
    head = b"".join(b"\x08" + varint(size) for size in dims) + b"\x10" + varint(kind) + part(8, name.encode())
    return whole(part(5, head + b"".join(fields)))


# --- against onnx's own reader ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_initializers_are_those_of_onnx(name: str) -> None:
    made = MODELS[name]
    raw = made.SerializeToString()
    graph = read_model(MemoryBytes("model.onnx", raw))
    assert list(graph.initializers) == [one.name for one in made.graph.initializer]
    assert [node.op for node in graph.nodes] == [node.op_type for node in made.graph.node]
    for one in made.graph.initializer:
        mine = graph.initializers[one.name]
        assert mine.shape == tuple(one.dims)
        assert DTYPES[mine.dtype] == NAMES[one.data_type]
        assert raw[mine.offset : mine.offset + mine.nbytes] == one.raw_data


@pytest.mark.parametrize("dtype", ["FLOAT", "DOUBLE", "COMPLEX64"])
def test_packed_numbers_are_read_where_they_are(dtype: str) -> None:
    values = [0.5, -2.0, 3.25]
    made = model([], {"t": onnx.helper.make_tensor("t", getattr(onnx.TensorProto, dtype), [3], values)})
    raw = made.SerializeToString()
    mine = read_model(MemoryBytes("model.onnx", raw)).initializers["t"]
    stored = onnx.numpy_helper.to_array(made.graph.initializer[0])
    assert mine.coded_bytes is None
    assert raw[mine.offset : mine.offset + mine.nbytes] == stored.tobytes()


def test_a_constant_with_two_axes_is_a_tensor_and_a_small_one_is_not() -> None:
    values = {"a": TABLE, "b": np.float32(3)}
    nodes = [
        onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.asarray(value)))
        for name, value in values.items()
    ]
    made = read(model(nodes, {}).SerializeToString())
    assert list(made.tensors) == ["a"]
    assert made.tensors["a"].shape == (24, 8)


def test_tensors_of_one_name_in_two_branches_are_both_there() -> None:
    uses = find_uses(read_model(MemoryBytes("model.onnx", MODELS["merged"].SerializeToString())))
    assert list(uses.tensors)[-2:] == ["onnx::MatMul_9", "optimum::if[1]/onnx::MatMul_9"]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_damage_is_refused_or_read_as_onnx_reads_it(name: str) -> None:
    raw = MODELS[name].SerializeToString()
    rng = np.random.default_rng(len(raw))
    accepted = 0
    for _ in range(1000):
        damaged = bytearray(raw)
        for place in rng.integers(0, len(raw), rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        if rng.random() < 0.3:
            begin = rng.integers(0, len(raw))
            del damaged[begin : begin + rng.integers(1, 40)]
        try:
            graph = read_model(MemoryBytes("model.onnx", bytes(damaged)))
            read(bytes(damaged))
        except BowlineError as error:
            assert error.message.isprintable()
            continue
        try:
            theirs = onnx.load_model_from_string(bytes(damaged)).graph.initializer
        except Exception:  # a message that Bowline passes over is damaged
            continue
        accepted += 1
        assert {one.name for one in theirs} == set(graph.initializers)
        for one in theirs:
            mine = graph.initializers[one.name]
            assert mine.shape == tuple(one.dims)
            if mine.coded_bytes is None and one.raw_data:
                assert damaged[mine.offset : mine.offset + mine.nbytes] == one.raw_data
    assert accepted > 100


def test_every_cut_is_refused_or_ends_behind_the_graph() -> None:
    raw = MODELS["own"].SerializeToString()
    whole_until = len(raw) - 40
    for length in range(0, whole_until, 7):
        assert refused(raw[:length])


# --- hostile sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "has no graph, expected an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "field of the wire type 6"),
        (part(7, b"", 1 << 63), "but its field 7 states 9223372036854775808"),
        (b"\x08\x0a\x3a" + b"\xff" * 9 + b"\x7f", "a number of more than 64 bits"),
        (b"\x08" + b"\xff" * 20, "a number of more than 64 bits"),
        (b"\x08\x0a\x3b\x3c", "field of the wire type 3 at byte 3, which ONNX lacks"),
        (b"\x00\x00", "field with the number 0"),
        (whole(b"") + part(7, b""), "has two graphs, expected one"),
        (b"\x08\x0a\x38\x01", "the graph has the wire type 0, expected 2"),
        (part(7, b""), "has no ir_version"),
        (tensor(dims=(1 << 62, 1 << 62)), "expected fewer than 2^62 bytes"),
        (tensor(dims=((1 << 64) - 1,)), "expected no negative size"),
        (tensor(dims=(1,) * 40), "more than 32 axes"),
        (tensor(part(9, b"1234")), "has 4 bytes of data, but F32 of shape [2] has 8"),
        (tensor(), "has no data, expected 8 bytes"),
        (tensor(kind=99), "has the type 99, expected one that ONNX 1.23 has"),
        (tensor(part(9, b"12345678"), part(4, b"12345678")), "data is stated twice"),
        (tensor(part(3, b"")), "in segments"),
        (tensor(b"\x25\x00\x00\x80\x3f" * 2), "not packed"),
        (tensor(part(7, b"12"), kind=1), "is F32, but its data is in the field 7"),
        (tensor(part(9, b"12345678"), name="é" * 3000), "has 6000 bytes, expected at most 4096"),
        (tensor(part(9, b"12345678"), b"\x42\x01\xff"), "expected UTF-8"),
        (tensor(b"\x70\x01"), "external data without a location"),
        (tensor(b"\x70\x07"), "at the location 7, expected 0 or 1"),
        (tensor(part(13, part(1, b"location") + part(2, b"x")), part(13, part(1, b"offset") + part(2, b"-1")),
                b"\x70\x01"), "with offset '-1', expected a number"),
        (tensor(part(13, part(1, b"location") + part(2, b"x")), part(13, part(1, b"length") + part(2, b"9")),
                b"\x70\x01"), "external data of 9 bytes, expected 8"),
    ],
)  # fmt: skip
def test_a_lie_is_one_line(raw: bytes, said: str) -> None:
    assert said in refused(raw)


def test_a_git_lfs_pointer_is_named_in_the_help() -> None:
    with pytest.raises(FormatError) as caught:
        read(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in (caught.value.help or "")


def test_graphs_in_graphs_are_read_to_a_bound() -> None:
    def nested(depth: int) -> bytes:
        graph = b""
        for _ in range(depth):
            graph = part(1, part(4, b"If") + part(5, part(1, b"then_branch") + part(6, graph)))
        return whole(graph)

    assert read(nested(MOST_DEPTH)).tensors == {}
    assert "nested more than 8 deep" in refused(nested(MOST_DEPTH + 1))
    assert "nested more than 8 deep" in refused(nested(4000))


@pytest.mark.parametrize(
    "raw",
    [
        whole(part(5, b"\x08\x02" * 50_000)),
        whole(part(1, part(1, b"a") * 20_000)),
        whole(b"".join(part(1, part(1, b"%d" % number)) for number in range(5_000))),
        tensor(part(9, b"0" * 8), dims=(1 << 40, 1 << 20)),
    ],
    ids=["sizes", "inputs", "nodes", "bytes"],
)
def test_hostile_counts_cost_little_memory(raw: bytes) -> None:
    tracemalloc.start()
    with contextlib.suppress(FormatError):
        read(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_numbers_in_varints_are_decoded() -> None:
    made: Any = onnx.helper.make_tensor("t", onnx.TensorProto.INT8, [3], [-1, 0, 127])
    assert made.int32_data
    graph = read_model(MemoryBytes("model.onnx", model([], {"t": made}).SerializeToString()))
    assert graph.initializers["t"].coded_bytes == 12


def test_many_tensors_of_one_name_and_many_products_take_little_time() -> None:
    inner = part(5, b"\x08\x00\x10\x01" + part(8, b"t"))
    branch = part(5, part(1, b"g") + part(6, inner))
    names = b"".join(part(1, name) for name in (b"ids", b"head")) + part(2, b"logits") + part(4, b"MatMul")
    head = part(5, b"\x08\x02\x08\x02\x10\x01" + part(8, b"head") + part(9, bytes(16)))
    graph = part(1, part(4, b"If") + branch * 3000) + part(1, names) * 3000 + head + part(12, part(1, b"logits"))
    started = time.perf_counter()
    found = read(whole(graph))
    assert time.perf_counter() - started < 10
    assert len(found.tensors) == 3001
