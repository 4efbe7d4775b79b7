"""Dequantised rows against those of the package `gguf`: recorded for each type by `tools/gguf_vectors.py`, and live."""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bowline.checkpoint.formats.gguf.blocks import _EXPAND, dequantise
from bowline.checkpoint.formats.gguf.ggml_types import BLOCKS, DEQUANTISED, GGML_TYPES, NEWER_THAN_GGUF
from bowline.errors import FormatError
from tests.checkpoint.gguf_files import KINDS, q4_0, q8_0

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "dequantised.json").read_text())
VECTORS: dict[str, dict[str, Any]] = RECORD["vectors"]
ASKED_FOR = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
GGUF = Path(__file__).parents[4] / ".peers" / "gguf"


def same(ours: npt.NDArray[Any], theirs: npt.NDArray[np.float32]) -> bool:
    """Whether two arrays are equal bit for bit; every NaN counts as the same."""
    values = ours.astype(np.float32)
    bits = values.view(np.uint32) == theirs.view(np.uint32)
    return values.shape == theirs.shape and bool((bits | (np.isnan(values) & np.isnan(theirs))).all())


def test_the_record_has_every_type_that_tables_have() -> None:
    assert set(VECTORS) >= ASKED_FOR
    assert set(VECTORS) >= DEQUANTISED
    assert set(_EXPAND) == DEQUANTISED


@pytest.mark.parametrize("dtype", VECTORS)
def test_blocks_have_the_values_that_gguf_gives(dtype: str) -> None:
    vector = VECTORS[dtype]
    theirs = np.frombuffer(b64decode(vector["values"]), np.float32).reshape(vector["shape"])
    assert same(dequantise(b64decode(vector["blocks"]), dtype, vector["shape"]), theirs)


@pytest.mark.parametrize("dtype", sorted(DEQUANTISED))
def test_a_table_of_many_blocks_is_dequantised_block_by_block(dtype: str) -> None:
    vector = VECTORS[dtype]
    raw = np.frombuffer(b64decode(vector["blocks"]), np.uint8).reshape(vector["shape"][0], -1)
    few = dequantise(raw.tobytes(), dtype, vector["shape"])
    chosen = np.random.default_rng(0).integers(0, len(raw), 10_000)
    assert same(
        dequantise(raw[chosen].tobytes(), dtype, (5000, 2 * raw_elements(dtype))), few[chosen].reshape(5000, -1)
    )


def raw_elements(dtype: str) -> int:
    return BLOCKS[dtype].elements


def test_types_have_the_numbers_and_sizes_that_gguf_gives_them() -> None:
    ours = {kind.name: [number, kind.elements, kind.nbytes] for number, kind in GGML_TYPES.items()}
    assert {name: sizes for name, sizes in ours.items() if name not in NEWER_THAN_GGUF} == RECORD["sizes"]


def test_a_quantised_table_is_near_the_table() -> None:
    table = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    for stored, most in ((q8_0(table), 0.01), (q4_0(table), 0.15)):
        rows = dequantise(stored.raw, stored.dtype, stored.shape)
        assert np.abs(rows - table).mean() < most


def test_what_is_not_dequantised_is_said() -> None:
    assert set(KINDS) - DEQUANTISED - set(VECTORS) >= {"IQ2_XXS", "MXFP4", "Q8_1"}
    with pytest.raises(FormatError, match="IQ2_XXS is not dequantised, expected one of Q8_0"):
        dequantise(bytes(66), "IQ2_XXS", (1, 256))
    with pytest.raises(FormatError, match="33 bytes for Q8_0 of shape"):
        dequantise(bytes(33), "Q8_0", (1, 32))
    assert dequantise(b"", "Q4_K", (0, 256)).shape == (0, 256)


@pytest.mark.real
@pytest.mark.parametrize("dtype", sorted(DEQUANTISED))
def test_many_random_blocks_have_the_values_that_gguf_gives(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not GGUF.exists():
        pytest.skip("the package gguf is not here: run `make real`")
    monkeypatch.syspath_prepend(str(GGUF))
    gguf = pytest.importorskip("gguf")
    kind = BLOCKS[dtype]
    raw = np.random.default_rng(7).integers(0, 256, (20_000, kind.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    assert same(dequantise(raw.tobytes(), dtype, (len(raw), kind.elements)), theirs)
    assert "gguf" in sys.modules
