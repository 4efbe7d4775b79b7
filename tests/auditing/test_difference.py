"""The likely cause that is reported for a difference between two tables is the change that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bowline.auditing.difference import Cause, TableDifference, explain_difference
from bowline.auditing.row_scan import rounded, scan_tables
from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.numpy_writer import Bits
from tests.checkpoints import GPT2, HEAD, WTE, write

ROWS, COLUMNS = 320, 136
Table = npt.NDArray[np.float32]


def table(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0, std: float = 0.02) -> Table:
    return (std * np.random.default_rng(seed).normal(size=(rows, columns))).astype(np.float32)


def low_rank(rank: int, scale: float = 0.5, rows: int = ROWS, columns: int = COLUMNS) -> npt.NDArray[np.float64]:
    """A LoRA delta: B A, each as large as training makes it."""
    random = np.random.default_rng(7)
    left, right = random.normal(size=(rows, rank)), random.normal(size=(rank, columns))
    delta: npt.NDArray[np.float64] = scale * 0.02 * left @ right / np.sqrt(rank)
    return delta


def bf16(values: npt.NDArray[Any]) -> Bits:
    return Bits("BF16", (rounded(values, "BF16").view(np.uint32) >> 16).astype(np.uint16))


@np.errstate(over="ignore", invalid="ignore")  # as in an audit
def difference(path: Path, source: Any, target: Any) -> TableDifference:
    with open_checkpoint(write(path, {WTE: source, HEAD: target}, GPT2)) as checkpoint:
        stored = checkpoint.tensors[WTE]
        (pair,) = scan_tables(checkpoint, stored, [checkpoint.tensors[HEAD]]).pairs
        found = explain_difference(checkpoint, pair, stored)
    assert found is not None
    return found


def test_two_equal_tables_have_no_difference(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {WTE: table(), HEAD: table()}, GPT2)) as checkpoint:
        stored = checkpoint.tensors[WTE]
        (pair,) = scan_tables(checkpoint, stored, [checkpoint.tensors[HEAD]]).pairs
        assert explain_difference(checkpoint, pair, stored) is None


# --- a merged low-rank delta ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32])
def test_a_delta_of_low_rank_in_float32_has_its_rank(tmp_path: Path, rank: int) -> None:
    found = difference(tmp_path, table(), (table() + low_rank(rank)).astype(np.float32))
    assert (found.cause, found.rank, found.dtype) == (Cause.LOW_RANK, rank, None)
    assert str(found) == f"a merged low-rank delta of rank {rank}"


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32])
def test_a_delta_of_low_rank_in_bf16_has_nearly_its_rank(tmp_path: Path, rank: int) -> None:
    source = rounded(table(), "BF16")
    found = difference(tmp_path, bf16(source), bf16((source + low_rank(rank)).astype(np.float32)))
    assert found.cause is Cause.LOW_RANK
    assert found.rank is not None
    assert abs(found.rank - rank) <= rank // 4


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_delta_that_is_small_beside_the_weights_is_still_of_low_rank(tmp_path: Path, dtype: str) -> None:
    source = rounded(table(), "BF16")
    target = (source + low_rank(4, scale=0.1)).astype(np.float32)
    found = difference(tmp_path, *((source, target) if dtype == "F32" else (bf16(source), bf16(target))))
    assert (found.cause, found.rank) == (Cause.LOW_RANK, 4)


def test_a_delta_on_some_rows_only_is_of_low_rank_too(tmp_path: Path) -> None:
    target = table().astype(np.float64)
    target[::2] += low_rank(4)[::2]
    found = difference(tmp_path, table(), target.astype(np.float32))
    assert (found.cause, found.rank, found.rows_differing) == (Cause.LOW_RANK, 4, ROWS // 2)


def test_a_delta_too_wide_for_its_table_is_not_of_low_rank(tmp_path: Path) -> None:
    found = difference(tmp_path, table(), (table() + low_rank(60)).astype(np.float32))
    assert found.cause is Cause.ALL_ROWS


# --- noise, and training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scale"), [("F32", 1e-6), ("F32", 1e-3), ("F32", 1.0), ("BF16", 1e-3), ("BF16", 0.03), ("BF16", 1.0)]
)
def test_noise_is_not_of_low_rank(tmp_path: Path, dtype: str, scale: float) -> None:
    noisy = (table() + np.float32(scale) * table(seed=1)).astype(np.float32)
    found = difference(tmp_path, *((table(), noisy) if dtype == "F32" else (bf16(table()), bf16(noisy))))
    assert (found.cause in (Cause.ALL_ROWS, Cause.SOME_ROWS), found.rank, found.dtype) == (True, None, None)


def test_a_head_of_its_own_is_all_rows(tmp_path: Path) -> None:
    found = difference(tmp_path, table(), table(seed=1))
    assert (found.cause, str(found)) == (Cause.ALL_ROWS, "all rows")
    assert found.some_rows == tuple(range(8))
    assert found.max_abs_difference == pytest.approx(np.abs(table() - table(seed=1)).max(), rel=1e-6)


def with_spectrum(values: npt.NDArray[np.float64], rows: int = 640, columns: int = 288) -> npt.NDArray[np.float64]:
    """A matrix with these singular values and random directions."""
    random = np.random.default_rng(11)
    left, _ = np.linalg.qr(random.normal(size=(rows, len(values))))
    right, _ = np.linalg.qr(random.normal(size=(columns, len(values))))
    delta: npt.NDArray[np.float64] = (left * values) @ right.T
    return delta


def stored(values: npt.NDArray[Any], dtype: str) -> Any:
    short = rounded(values.astype(np.float32), dtype)
    return bf16(short) if dtype == "BF16" else short.astype(np.float16) if dtype == "F16" else short


FULL = {  # singular values of heads that were trained in full, in units of the largest: see docs/notes/low-rank.md
    "AdamW": 0.34 * np.arange(1.0, 289.0) ** -1.1,
    "SGD": 0.35 * np.arange(1.0, 289.0) ** -1.6,
    "from a fresh draw": 0.09 * np.arange(1.0, 289.0) ** -0.7,
    "long": np.linspace(1.0, 0.008, 288),
}


@pytest.mark.parametrize("size", [0.003, 0.03, 0.3])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("training", FULL)
def test_a_head_trained_in_full_is_not_of_low_rank(tmp_path: Path, training: str, dtype: str, size: float) -> None:
    values = FULL[training].copy()
    values[0] = 1.0
    delta = with_spectrum(values)
    delta *= size * 0.02 / delta.std()
    source = stored(table(640, 288), dtype)
    base = table(640, 288) if dtype == "F32" else rounded(table(640, 288), dtype)
    found = difference(tmp_path, source, stored(base + delta, dtype))
    assert (found.cause in (Cause.ALL_ROWS, Cause.SOME_ROWS), found.rank) == (True, None)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize("least", [0.03, 0.007, 0.0006])
def test_an_adapter_of_uneven_spectrum_has_its_rank_or_none(
    tmp_path: Path, rank: int, least: float, dtype: str
) -> None:
    values = np.geomspace(1.0, least, rank)
    delta = with_spectrum(values)
    delta *= 0.1 * 0.02 / delta.std()
    base = table(640, 288) if dtype == "F32" else rounded(table(640, 288), dtype)
    found = difference(tmp_path, stored(base, dtype), stored(base + delta, dtype))
    assert found.rank in ((rank,) if dtype == "F32" else (rank, None))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("size", [0.01, 0.06, 0.5])
def test_a_second_direction_a_thousand_times_weaker_is_not_overlooked(tmp_path: Path, size: float, dtype: str) -> None:
    delta = with_spectrum(np.array([1.0, 0.001]))
    delta *= size * 0.02 / delta.std()
    base = table(640, 288) if dtype == "F32" else rounded(table(640, 288), dtype)
    found = difference(tmp_path, stored(base, dtype), stored(base + delta, dtype))
    assert found.rank in (2, None)


def test_a_delta_that_was_computed_in_bf16_is_of_low_rank_in_float32(tmp_path: Path) -> None:
    delta = rounded(low_rank(8).astype(np.float32), "BF16")
    found = difference(tmp_path, table(), (table() + delta).astype(np.float32))
    assert (found.cause, found.rank) == (Cause.LOW_RANK, 8)


def test_bf16_tables_that_are_stored_as_float32_are_held_to_the_rounding_of_bf16(tmp_path: Path) -> None:
    source = rounded(table(), "BF16")
    found = difference(tmp_path, source, rounded((source + low_rank(8)).astype(np.float32), "BF16"))
    assert (found.cause, found.rank) == (Cause.LOW_RANK, 8)


def test_a_wide_adapter_of_a_wide_table_has_its_rank(tmp_path: Path) -> None:
    target = table(600, 520) + low_rank(128, rows=600, columns=520)
    found = difference(tmp_path, table(600, 520), target.astype(np.float32))
    assert (found.cause, found.rank) == (Cause.LOW_RANK, 128)


# --- casts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("which", ["target", "source"])
def test_a_side_that_went_through_a_shorter_dtype_is_a_cast(tmp_path: Path, dtype: str, which: str) -> None:
    cast = rounded(table(), dtype)
    found = difference(tmp_path, *((table(), cast) if which == "target" else (cast, table())))
    assert (found.cause, found.dtype, found.rank) == (Cause.ROUNDING, dtype, None)
    assert str(found) == f"noise from a cast through {dtype}"


def test_a_cast_with_one_value_more_changed_is_not_only_a_cast(tmp_path: Path) -> None:
    cast = rounded(table(), "BF16")
    cast[0, 0] += 1
    assert difference(tmp_path, table(), cast).cause is not Cause.ROUNDING


def test_a_cast_that_overflows_is_said_without_a_warning(tmp_path: Path) -> None:
    large = table(std=1e30)
    found = difference(tmp_path, large, rounded(large, "BF16"))
    assert (found.cause, found.dtype) == (Cause.ROUNDING, "BF16")


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [1, 7, ROWS // 10])
def test_rows_at_the_end_are_added_tokens(tmp_path: Path, added: int) -> None:
    target = table()
    target[-added:] = table(seed=1)[-added:]
    found = difference(tmp_path, table(), target)
    assert (found.cause, found.rows_differing) == (Cause.ADDED_TOKENS, added)
    assert found.some_rows == tuple(range(ROWS - added, ROWS))[:8]


@pytest.mark.parametrize("rows", [[0], [5, 9, 77], list(range(0, ROWS, 20)), [ROWS - 3, ROWS - 1], [ROWS - 9]])
def test_rows_here_and_there_are_some_rows(tmp_path: Path, rows: list[int]) -> None:
    target = table()
    target[rows] = table(seed=1)[rows]
    found = difference(tmp_path, table(), target)
    assert (found.cause, found.rows_differing, found.some_rows) == (Cause.SOME_ROWS, len(rows), tuple(rows[:8]))


def test_more_rows_at_the_end_than_anybody_adds_are_some_rows(tmp_path: Path) -> None:
    target = table()
    target[ROWS // 2 :] = table(seed=1)[ROWS // 2 :]
    assert difference(tmp_path, table(), target).cause is Cause.SOME_ROWS


def test_rows_that_are_not_finite_are_left_out_of_the_explanation(tmp_path: Path) -> None:
    target = (table() + low_rank(4)).astype(np.float32)
    target[::50] = np.nan
    found = difference(tmp_path, table(), target)
    assert (found.cause, found.rank) == (Cause.LOW_RANK, 4)
    assert np.isfinite(found.max_abs_difference)


def test_a_table_of_nothing_but_nan_is_all_rows(tmp_path: Path) -> None:
    found = difference(tmp_path, table(), np.full((ROWS, COLUMNS), np.nan, np.float32))
    assert (found.cause, found.max_abs_difference) == (Cause.ALL_ROWS, 0.0)


def test_numbers_at_opposite_ends_of_float64_are_all_rows(tmp_path: Path) -> None:
    huge = np.full((ROWS, COLUMNS), 1.7e308)
    found = difference(tmp_path, huge, -huge)
    assert found.cause is Cause.ALL_ROWS
