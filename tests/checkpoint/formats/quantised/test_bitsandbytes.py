"""bitsandbytes' layouts against its formulas, value by value; the library itself needs no installation here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.formats.quantised.vectors import InMemory

BELOW = (-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0)
ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1)
NF4 = np.array((*BELOW, *ABOVE), np.float32)
"""The 16 values of NF4 (Dettmers et al., "QLoRA", 2023)."""
ROWS, COLUMNS, BLOCK = 6, 21, 8
"""An odd number of columns, so that rows begin within a byte and within a block."""


def four_bits(*, nested: bool, **state: Any) -> InMemory:
    random = np.random.default_rng(0)
    count, blocks = ROWS * COLUMNS, -(-ROWS * COLUMNS // BLOCK)
    said = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    tensors = {"weight": random.integers(0, 256, (-(-count // 2), 1), np.uint8), "weight.quant_map": NF4}
    if nested:
        said |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors["weight.absmax"] = random.integers(0, 256, blocks, np.uint8)
        tensors["weight.nested_absmax"] = random.uniform(0, 0.1, -(-blocks // 4)).astype(np.float32)
        tensors["weight.nested_quant_map"] = np.linspace(-1, 1, 256).astype(np.float32)
    else:
        tensors["weight.absmax"] = random.uniform(0, 0.2, blocks).astype(np.float32)
    packed = np.frombuffer(json.dumps(said | state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = packed
    return InMemory(**{f"head.{name}": tensor for name, tensor in tensors.items()})


def array(memory: InMemory, name: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(memory.bytes[f"head.{name}"], dtype)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_follow_the_formula_also_where_rows_begin_within_a_byte(nested: bool) -> None:
    memory = four_bits(nested=nested)
    table = memory.recognise()
    assert table is not None
    assert table.layout == f"bitsandbytes NF4, blocks of {BLOCK}" + (", scales of 8 bits" if nested else "")
    assert table.shape == (ROWS, COLUMNS)
    octets = array(memory, "weight", "u1")
    expected = np.empty(ROWS * COLUMNS, np.float32)
    for at in range(len(expected)):
        code = octets[at // 2] >> 4 if at % 2 == 0 else octets[at // 2] & 15
        block = at // BLOCK
        if nested:
            own = array(memory, "weight.nested_absmax", "<f4")[block // 4]
            step = array(memory, "weight.nested_quant_map", "<f4")[array(memory, "weight.absmax", "u1")[block]]
            scale = step * own + np.float32(0.25)
        else:
            scale = array(memory, "weight.absmax", "<f4")[block]
        expected[at] = NF4[code] * scale
    for start, stop in ((0, ROWS), (1, 2), (3, 6)):
        values, steps = table.rows(memory.stored, start, stop)
        np.testing.assert_array_equal(values, expected.reshape(ROWS, COLUMNS)[start:stop])
        assert steps.shape == values.shape


def test_a_step_of_four_bits_is_the_wider_gap_beside_the_value() -> None:
    memory = four_bits(nested=False)
    table = memory.recognise()
    assert table is not None
    values, steps = table.rows(memory.stored, 0, 1)
    scale = array(memory, "weight.absmax", "<f4")[0]
    largest = np.flatnonzero(np.isclose(values[0, :BLOCK], scale))
    assert np.allclose(steps[0, largest], (1 - 0.72295684) * scale)


def test_eight_bits_are_codes_times_the_largest_value_over_127() -> None:
    random = np.random.default_rng(1)
    codes, largest = random.integers(-127, 128, (5, 7), np.int8), random.uniform(0.1, 2, 5).astype(np.float32)
    memory = InMemory(**{"head.weight": codes, "head.SCB": largest, "head.weight_format": np.zeros((), np.uint8)})
    table = memory.recognise()
    assert table is not None
    assert table.layout == "bitsandbytes int8, a scale per row"
    values, steps = table.rows(memory.stored, 0, 5)
    np.testing.assert_array_equal(values, codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127))
    np.testing.assert_allclose(steps[:, 0], largest / 127)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"blocksize": 0}, "blocksize"),
        ({"blocksize": "64"}, "blocksize"),
        ({"shape": [6]}, "shape"),
        ({"shape": [6, 2**40]}, "table of"),
        ({"shape": [6, 22]}, "bytes for"),
        ({"shape": [-1, -1]}, "table of"),
    ],
)
def test_a_state_that_lies_is_a_problem(state: dict[str, Any], words: str) -> None:
    table = four_bits(nested=False, **state).recognise()
    assert table is not None
    assert words in (table.problem or "")
