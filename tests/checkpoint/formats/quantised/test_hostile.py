"""Quantised weights whose parts do not fit each other: a problem or a `FormatError`, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.quantised import recognise
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.errors import FormatError
from tests.checkpoint.formats.quantised.vectors import NAME, InMemory, read_vectors

VECTORS = read_vectors()
GPTQ = "gptq 4 bits, gptq"


def copy_of(name: str) -> InMemory:
    memory = InMemory()
    memory.tensors, memory.bytes = dict(VECTORS[name].memory.tensors), dict(VECTORS[name].memory.bytes)
    return memory


def problem(memory: InMemory, config: dict[str, Any]) -> str:
    """Why the weight cannot be dequantised: told when it is recognised, or when its rows are read."""
    table = memory.recognise(config)
    assert table is not None
    if table.problem is not None:
        return table.problem
    with pytest.raises(FormatError) as raised:
        table.rows(memory.stored, 0, 1)
    return str(raised.value)


@pytest.mark.parametrize("groups", [-1, 2, 2**31 - 1])
def test_a_group_that_does_not_exist(groups: int) -> None:
    memory = copy_of(GPTQ)
    memory.add("head.g_idx", "I32", (64,), np.full(64, groups, "<i4").tobytes())
    assert "groups from" in problem(memory, dict(VECTORS[GPTQ].config))


@pytest.mark.parametrize("size", [0, -5, 2**62, "64", None, True])
def test_an_odd_group_size_in_mlx(size: Any) -> None:
    name = "mlx 4 bits, groups of 32"
    memory = copy_of(name)
    assert problem(memory, {"quantization": {"group_size": size, "bits": 4}})


@pytest.mark.parametrize("bits", [0, 1, 7, 16, -4, "4", 10**30])
def test_an_odd_width_in_mlx(bits: Any) -> None:
    assert problem(copy_of("mlx 4 bits, groups of 32"), {"quantization": {"group_size": 32, "bits": bits}})


def test_scales_of_another_shape() -> None:
    memory = copy_of(GPTQ)
    memory.add("head.scales", "F16", (2, 8), bytes(32))
    assert "scales" in problem(memory, dict(VECTORS[GPTQ].config))


def test_a_shape_that_lies_in_compressed_tensors() -> None:
    name = "pack-quantized 4 bits, 32, symmetric"
    for shape in ([16, 65], [17, 64], [2**40, 64], [-16, 64]):
        memory = copy_of(name)
        memory.add("head.weight_shape", "I64", (2,), np.array(shape, "<i8").tobytes())
        assert problem(memory, dict(VECTORS[name].config))


def test_tables_of_absurd_size_are_refused_before_anything_is_read() -> None:
    tensors = {
        "head.weight": StoredTensor("head.weight", "I8", (2**40, 2**20), "f", 0, 2**60),
        "head.SCB": StoredTensor("head.SCB", "F32", (2**40,), "f", 0, 2**42),
    }
    table = recognise(NAME, tensors, stored=lambda _tensor: pytest.fail("read"))
    assert table is not None
    assert "at most" in (table.problem or "")


def test_a_layout_that_is_not_dequantised_is_named() -> None:
    memory = InMemory()
    memory.add("head._weight_qdata", "I32", (2, 1, 32, 4), bytes(1024))
    metadata = {NAME: json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})}
    table = memory.recognise({}, metadata)
    assert table is not None
    assert "Int4TilePackedTo4dTensor is not dequantised" in (table.problem or "")


def test_damaged_weights_raise_nothing_but_format_errors() -> None:
    random = np.random.default_rng(0)
    names = list(VECTORS)
    read = 0
    for _ in range(3000):
        name = names[random.integers(len(names))]
        memory = copy_of(name)
        for _ in range(random.integers(1, 3)):
            part = sorted(memory.tensors)[random.integers(len(memory.tensors))]
            tensor = memory.tensors[part]
            shape = list(tensor.shape)
            dtype = tensor.dtype
            match random.integers(5):
                case 0:
                    dtype = sorted(BITS)[random.integers(len(BITS))]
                case 1 if shape:
                    shape[random.integers(len(shape))] = int(random.integers(0, 70))
                case 2:
                    shape = shape[1:] if random.integers(2) else [1, *shape]
                case 3 if len(memory.tensors) > 1:
                    del memory.tensors[part]
                    continue
                case _:
                    noise = random.integers(0, 256, len(memory.bytes[part]), np.uint8)
                    memory.bytes[part] = noise.tobytes()
                    continue
            nbytes = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
            memory.add(part, dtype, tuple(shape), random.integers(0, 256, nbytes, np.uint8).tobytes())
        config = json.loads(json.dumps(VECTORS[name].config))
        for settings in config.values():
            if random.integers(3) == 0 and settings:
                odd: list[Any] = [None, 0, -1, "x", [], {}, 2**70, True, 1.5]
                settings[sorted(settings)[random.integers(len(settings))]] = odd[random.integers(len(odd))]
        metadata = dict(VECTORS[name].metadata)
        if metadata and random.integers(3) == 0:
            metadata[NAME] = ["{", "[]", '{"_type": 3}', '{"_type": "Int8Tensor", "_data": []}'][random.integers(4)]
        table = memory.recognise(config, metadata)
        if table is None or table.problem is not None or table.shape is None:
            continue
        assert recognise(NAME, memory.tensors, config, metadata) is not None  # by headers too
        try:
            values, steps = table.rows(memory.stored, 0, table.shape[0])
        except FormatError:
            continue
        assert values.shape == table.shape
        np.broadcast_to(steps, values.shape)
        read += 1
    assert read > 300
