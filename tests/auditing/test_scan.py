"""The row scan agrees with decoded values for any number of blocks and threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.auditing import row_scan
from bowline.auditing.row_scan import Scan, can_scan, rounded, scan_tables
from bowline.auditing.row_statistics import describe_table
from bowline.checkpoint import Checkpoint, StoredTensor
from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.places.byte_source import ByteSource, MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from tests.checkpoint.pickled import dictionary, saved, storage, tensor

Words = npt.NDArray[Any]
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")


class Files(FileSet):
    """One file, in memory."""

    location = "memory"

    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content = name, content

    def sizes(self) -> Mapping[str, int]:
        return {self.name: len(self.content)}

    def open(self, name: str) -> ByteSource:
        return MemoryBytes(name, self.content)


def checkpoint(**tables: tuple[str, Words]) -> Checkpoint:
    """A safetensors file of bit patterns, one after the other however they align."""
    import json

    header, data = {}, b""
    for name, (dtype, words) in tables.items():
        raw = words.tobytes()
        header[name] = {"dtype": dtype, "shape": words.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return Checkpoint(Files("model.safetensors", len(text).to_bytes(8, "little") + text + data))


def run(opened: Checkpoint, first: str = "a", *others: str) -> Scan:
    return scan_tables(opened, opened.tensors[first], [opened.tensors[other] for other in others])


def values_of(words: Words, dtype: str) -> Words:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return decode(words.tobytes(), dtype, words.shape).reshape(len(words), prod(words.shape[1:])).astype(np.float64)


@contextmanager
def blocks(size: int, threads: int = 1) -> Iterator[None]:
    with patch.object(row_scan, "BLOCK_BYTES", size), patch.object(os, "cpu_count", lambda: threads):
        yield


# --- any table ------------------------------------------------------------------------------------------------------


def pool(dtype: str) -> list[int]:
    """Bit patterns at which something changes: zeros, ones, the edges of what is finite, NaN of both kinds."""
    bits = BITS[dtype]
    sign = 1 << (bits - 1)
    infinity = row_scan.INFINITY_BITS[dtype]
    magnitudes = [0, 1, infinity - 1, infinity, min(infinity + 1, sign - 1), sign - 1, infinity // 2, infinity // 2 + 1]
    return sorted({pattern | flip for pattern in magnitudes for flip in (0, sign)})


@st.composite
def tables(draw: st.DrawFn, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> tuple[str, Words]:
    dtype = dtype or draw(st.sampled_from(DTYPES))
    shape = shape or draw(
        st.one_of(
            st.tuples(st.integers(0, 24), st.sampled_from([0, 1, 2, 3, 5, 8])),
            st.tuples(st.integers(1, 24)),
            st.tuples(st.just(1), st.integers(1, 9)),
            st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
        )
    )
    patterns = draw(st.lists(st.sampled_from(pool(dtype)), min_size=prod(shape), max_size=prod(shape)))
    return dtype, np.array(patterns, f"<u{BITS[dtype] // 8}").reshape(shape)


@settings(max_examples=150)
@given(tables(), st.integers(1, 64))
def test_rows_are_what_their_values_are(table: tuple[str, Words], block: int) -> None:
    dtype, words = table
    with blocks(block):
        rows = run(checkpoint(a=table)).rows
    values = values_of(words, dtype)
    assert rows.zero.tolist() == (values == 0).all(axis=1).tolist()
    assert rows.not_finite.tolist() == (~np.isfinite(values)).any(axis=1).tolist()


@settings(max_examples=150)
@given(tables(), st.integers(1, 64))
def test_duplicates_are_the_rows_of_equal_bytes(table: tuple[str, Words], block: int) -> None:
    dtype, words = table
    if words.ndim != 2:
        return
    opened = checkpoint(a=table)
    with blocks(block):
        described = describe_table(opened, run(opened).rows)
    values = values_of(words, dtype)
    sound = [row for row in range(len(words)) if np.isfinite(values[row]).all() and values[row].any()]
    groups: dict[bytes, list[int]] = {}
    for row in sound:
        groups.setdefault(words[row].tobytes(), []).append(row)
    assert sorted(described.duplicates) == sorted(tuple(group) for group in groups.values() if len(group) > 1)


@settings(max_examples=200)
@given(st.data(), tables(), st.integers(1, 64), st.booleans())
def test_differences_are_those_of_the_values(
    data: st.DataObject, first: tuple[str, Words], block: int, same: bool
) -> None:
    dtype, words = first
    other_dtype = dtype if same else data.draw(st.sampled_from(DTYPES))
    if same and data.draw(st.booleans()):
        other_words = words.copy()  # equal but for some places
        for at in data.draw(st.lists(st.integers(0, max(0, words.size - 1)), max_size=2)) if words.size else []:
            other_words.reshape(-1)[at] = data.draw(st.sampled_from(pool(dtype)))
        other = (dtype, other_words)
    else:
        other = data.draw(tables(other_dtype, words.shape))
    with blocks(block):
        (pair,) = run(checkpoint(a=first, b=other), "a", "b").pairs
    left, right = values_of(words, dtype), values_of(other[1], other[0])
    unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(left - right)
    assert pair.differs.tolist() == unequal.any(axis=1).tolist()
    assert pair.max_abs_difference == distance[np.isfinite(distance)].max(initial=0.0)
    assert pair.has_nan == bool(np.isnan(left).any() or np.isnan(right).any())


@settings(max_examples=100)
@given(tables("F32"), st.sampled_from(["BF16", "F16"]), st.integers(1, 64))
def test_two_dtypes_agree_once_cast_exactly_when_the_cast_of_one_is_the_other(
    first: tuple[str, Words], short: str, block: int
) -> None:
    wide = first[1].view(np.float32)
    with np.errstate(over="ignore"):
        cast = nearest_bf16(wide) if short == "BF16" else wide.astype(np.float16).view(np.uint16)
    with blocks(block):
        (pair,) = run(checkpoint(a=first, b=(short, cast)), "a", "b").pairs
    assert pair.equal_in_shorter == (not np.isnan(wide).any())


def nearest_bf16(values: npt.NDArray[np.float32]) -> Words:
    """By the definition: of the two neighbours the nearer one, of two as near the even one."""
    out = np.empty(values.shape, np.uint16)
    for at, value in np.ndenumerate(values):
        bits = int(value.view(np.uint32))
        low, high = bits >> 16, (bits >> 16) + 1
        rest = bits & 0xFFFF
        out[at] = low if np.isnan(value) or rest < 0x8000 or (rest == 0x8000 and low % 2 == 0) else high
        if np.isnan(value):
            out[at] = 0x7FC0
    return out


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    expected = (nearest_bf16(values).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(rounded(values, "BF16"), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_rounding_past_the_range_is_infinite_without_a_warning(dtype: str) -> None:
    assert np.isinf(rounded(np.array([1e300, -1e300]), dtype)).all()


# --- blocks, threads, columns ---------------------------------------------------------------------------------------


def random_words(rows: int, columns: int, seed: int = 0) -> Words:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, None])
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_the_number_of_threads_and_the_size_of_blocks_change_nothing(threads: int, block: int) -> None:
    left, right = random_words(1000, 7), random_words(1000, 7)
    right[::3, 2] ^= 1
    right[999] = 0x7FC00000
    opened = checkpoint(a=("F32", left), b=("F32", right))
    with blocks(block, threads):
        found = run(opened, "a", "b")
    with blocks(1 << 30, 1):
        expected = run(opened, "a", "b")
    assert found.rows.largest_bits.tolist() == expected.rows.largest_bits.tolist()
    assert found.rows.fingerprint.tolist() == expected.rows.fingerprint.tolist()
    assert found.rows.norm.tolist() == expected.rows.norm.tolist()
    assert found.pairs[0].differs.tolist() == expected.pairs[0].differs.tolist()
    assert found.pairs[0].max_abs_difference == expected.pairs[0].max_abs_difference
    assert found.pairs[0].has_nan


def test_an_error_in_one_thread_is_the_error_of_the_scan() -> None:
    from bowline.errors import FormatError

    opened = checkpoint(a=("F32", random_words(1000, 7)))
    opened.files.content = opened.files.content[:20000]  # type: ignore[attr-defined]
    with blocks(100, 4), pytest.raises(FormatError):
        run(opened)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_values(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(40, 9)).astype(np.float32)
    patterns: dict[str, Words] = {
        "F64": values.astype(np.float64).view(np.uint64),
        "F32": values.view(np.uint32),
        "F16": values.astype(np.float16).view(np.uint16),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
        "F8_E5M2": (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8),
        "F8_E4M3": np.random.default_rng(1).integers(0, 0x7F, (40, 9), np.uint8),
    }
    exact = np.linalg.norm(values_of(patterns[dtype], dtype), axis=1)
    assert run(checkpoint(a=(dtype, patterns[dtype]))).rows.norm == pytest.approx(exact, rel=1e-5)


def test_norms_of_a_large_table_are_estimated_from_its_first_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scan, "NORM_ELEMENTS", 100)
    monkeypatch.setattr(row_scan, "NORM_COLUMNS", 64)
    values = np.random.default_rng(0).normal(size=(50, 256)).astype(np.float32)
    rows = run(checkpoint(a=("F32", values.view(np.uint32)))).rows
    assert rows.norm_columns == 64
    assert rows.norm == pytest.approx(2 * np.linalg.norm(values[:, :64], axis=1), rel=1e-5)
    assert run(checkpoint(a=("F32", values[:, :64].copy().view(np.uint32)))).rows.norm_columns is None


def test_several_tables_are_compared_in_one_pass() -> None:
    left = random_words(30, 4)
    changed = left.copy()
    changed[7, 1] ^= 1
    found = run(checkpoint(a=("F32", left), b=("F32", left), c=("F32", changed)), "a", "b", "c")
    assert [np.flatnonzero(pair.differs).tolist() for pair in found.pairs] == [[], [7]]


# --- views of pickles -----------------------------------------------------------------------------------------------

KINDS = {"F32": "FloatStorage", "F64": "DoubleStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_transposed_view_is_scanned_as_the_table_that_it_shows(dtype: str, block: int) -> None:
    bits = np.dtype(f"<u{BITS[dtype] // 8}")
    one, nan = {
        "F32": (0x3F800000, 0x7FC00000),
        "F64": (0x3FF << 52, 0x7FF8 << 48),
        "F16": (0x3C00, 0x7E00),
        "BF16": (0x3F80, 0x7FC0),
    }[dtype]
    flat = np.full(12, one, bits)
    flat[[0, 4, 8]] = 0
    flat[[1]] = nan
    data = {"0": flat.tobytes(), "1": flat.reshape(3, 4).T.copy().tobytes()}
    view = tensor((4, 3), (1, 4), of=storage("0", KINDS[dtype], 12))
    plain = tensor((4, 3), (3, 1), of=storage("1", KINDS[dtype], 12))
    opened = Checkpoint(Files("pytorch_model.bin", saved(dictionary({"view": view, "plain": plain}), data)))
    assert opened.tensors["view"].strides == (1, 4)
    for first, second in (("view", "plain"), ("plain", "view")):
        with blocks(block):
            found = run(opened, first, second)
        assert found.rows.zero.tolist() == [True, False, False, False]
        assert found.rows.not_finite.tolist() == [False, True, False, False]
        assert not found.pairs[0].differs.any()
        assert found.pairs[0].has_nan
        assert describe_table(opened, found.rows).duplicates == ((2, 3),)


# --- what is scanned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F32", (4, 2), True),
        ("BF16", (4,), True),
        ("F32", (), False),
        ("I8", (4, 2), False),
        ("F4", (4, 2), False),
        ("F8_E8M0", (4, 2), False),
    ],
)
def test_tables_and_vectors_of_floats_are_scanned(dtype: str, shape: tuple[int, ...], expected: bool) -> None:
    stored = StoredTensor(name="t", dtype=dtype, shape=shape, file="f", offset=0, nbytes=8)
    assert can_scan(stored) is expected
