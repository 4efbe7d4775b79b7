"""Written files are those that safetensors itself writes, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.numpy_writer import Bits, save_safetensors
from bowline.errors import UsageError

DTYPES = ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "<u8", "<u4", "<u2", "u1", "?", "<c8"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")


@settings(max_examples=100)
@given(tensors=st.dictionaries(NAMES, ARRAYS, max_size=5), metadata=st.none() | st.just({"format": "pt"}))
def test_the_file_is_the_one_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    save_safetensors(path, tensors, metadata)
    assert path.read_bytes() == safetensors.numpy.save(tensors, metadata)


def test_big_endian_and_transposed_arrays_are_written_row_by_row_little_endian(tmp_path: Path) -> None:
    values = np.arange(6, dtype=">f4").reshape(2, 3).T
    save_safetensors(tmp_path / "model.safetensors", {"t": values})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.rows("t").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_bit_patterns_keep_their_dtype_and_stand_by_width(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "a": Bits("F8_E4M3", np.array([0x38], np.uint8)),
        "b": np.ones(1, np.float64),
        "c": Bits("BF16", np.array([0x3F80], np.uint16)),
    }
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        stored = sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.offset)
        assert [tensor.dtype for tensor in stored] == ["F64", "BF16", "F8_E4M3"]
        assert {name: checkpoint.rows(name).tolist() for name in "abc"} == {"a": [1.0], "b": [1.0], "c": [1.0]}


@pytest.mark.parametrize("dtype", ["BF17", "F32", "bf16"])
def test_bits_of_a_dtype_of_another_width_or_none_are_a_usage_error(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"the bit patterns for {dtype} are uint16"):
        Bits(dtype, np.zeros(1, np.uint16))


@pytest.mark.parametrize("values", [np.zeros(1, np.complex128), np.zeros(1, "U3"), np.zeros(1, object)])
def test_a_dtype_that_has_no_name_in_safetensors_is_a_usage_error(tmp_path: Path, values: Any) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        save_safetensors(tmp_path / "model.safetensors", {"t": values})
    assert list(tmp_path.iterdir()) == []
