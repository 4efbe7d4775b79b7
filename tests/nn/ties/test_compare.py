"""How two tensors stand to each other and where they differ, bit by bit, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline import TieState
from bowline.nn.ties.tensor_comparison import BLOCK_ELEMENTS, difference, state_of

DTYPES = {torch.float32: np.int32, torch.float64: np.int64, torch.float16: np.int16, torch.int64: np.int64}


def brute(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """Rows that differ in a bit, and the largest difference among the entries that do, element by element."""
    rows, largest = 0, 0.0
    bits = DTYPES[one.dtype]
    for a, b in zip(one, other, strict=True):
        gaps = [
            abs(float(x) - float(y))
            for x, y in zip(a.flatten(), b.flatten(), strict=True)
            if x.numpy().view(bits) != y.numpy().view(bits)
        ]
        rows += bool(gaps)
        largest = max([largest, *(math.inf if math.isnan(gap) else gap for gap in gaps)])
    return rows, largest


VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 100.0, math.inf, -math.inf, math.nan])


@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=2 * n, max_size=2 * n), max_size=6)),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
@settings(max_examples=150)
def test_state_and_difference_agree_with_brute_force(rows: list[list[float]], dtype: torch.dtype) -> None:
    both = torch.tensor(rows, dtype=dtype).reshape(len(rows), -1) if rows else torch.zeros(0, 2, dtype=dtype)
    width = both.shape[1] // 2
    one, other = both[:, :width].clone(), both[:, width:].clone()
    count, largest = brute(one, other)
    found = difference(one, other)
    assert (found.rows, found.of, found.largest) == (count, len(rows), largest)
    assert state_of(one, other) is (TieState.DIVERGED if count else TieState.EQUAL)


def test_an_infinity_that_both_hold_is_no_difference() -> None:
    """The bias of a padded vocabulary is -inf at both ends; only what differs is measured."""
    one, other = torch.tensor([[-math.inf, 1.0]]), torch.tensor([[-math.inf, 1.5]])
    assert difference(one, other).largest == 0.5


def test_nan_equals_itself_and_is_infinitely_far_from_a_number() -> None:
    nan = torch.full((2, 2), math.nan)
    assert state_of(nan.clone(), nan) is TieState.EQUAL
    assert difference(nan, torch.zeros(2, 2)).largest == math.inf


def test_minus_zero_differs_by_nothing() -> None:
    found = difference(torch.tensor([[0.0]]), torch.tensor([[-0.0]]))
    assert (found.rows, found.largest) == (1, 0.0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool, torch.complex64]
)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    one = torch.zeros(3, 2).to(dtype)
    other = torch.tensor([[0, 0], [1, 0], [0, 0]]).to(dtype)
    found = difference(one, other)
    assert (found.rows, found.of, found.largest) == (1, 3, 1.0)
    assert state_of(one, one.clone()) is TieState.EQUAL


@pytest.mark.parametrize(("shape", "of"), [((5,), 5), ((), 1), ((2, 3, 4), 2)])
def test_rows_are_entries_of_the_first_axis(shape: tuple[int, ...], of: int) -> None:
    found = difference(torch.zeros(shape), torch.ones(shape))
    assert (found.rows, found.of, found.largest) == (of, of, 1.0)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_no_entries_are_no_difference(shape: tuple[int, ...]) -> None:
    found = difference(torch.zeros(shape), torch.ones(shape))
    assert (found.rows, found.of, found.largest) == (0, shape[0], 0.0)
    assert state_of(torch.zeros(shape), torch.ones(shape)) is TieState.EQUAL


def test_a_table_of_several_blocks_is_compared_to_its_last_row() -> None:
    width = BLOCK_ELEMENTS // 4
    one = torch.zeros(9, width)
    other = one.clone()
    other[8, -1] = other[3, 0] = 2.0
    found = difference(one, other)
    assert (found.rows, found.of, found.largest) == (2, 9, 2.0)


def test_a_transposed_layout_is_compared_by_value() -> None:
    one = torch.arange(6.0).view(2, 3)
    assert state_of(one.t().contiguous().t(), one) is TieState.EQUAL


def test_shifted_windows_of_one_matrix_are_not_an_alias_of_each_other() -> None:
    """They overlap, and no two elements of them are one: tying them would lose values."""
    table = torch.arange(24.0).view(6, 4)
    assert state_of(table[:5], table[1:]) is TieState.DIVERGED
    assert state_of(table[:5], table[:5]) is TieState.ALIAS


def test_a_square_matrix_and_its_transpose_are_not_an_alias_of_each_other() -> None:
    table = torch.arange(16.0).view(4, 4)
    assert state_of(table.t(), table) is TieState.DIVERGED
    assert state_of((table + table.t()).t(), table + table.t()) is TieState.EQUAL
