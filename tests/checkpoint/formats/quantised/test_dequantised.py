"""Dequantised rows against the values that the libraries of each layout gave."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint.formats.quantised.vectors import read_vectors

VECTORS = read_vectors()


@pytest.mark.parametrize("name", VECTORS)
def test_rows_equal_the_librarys_bit_for_bit(name: str) -> None:
    vector = VECTORS[name]
    table = vector.memory.recognise(vector.config, vector.metadata)
    assert table is not None
    assert table.problem is None
    assert table.shape == vector.values.shape
    rows = table.rows(vector.memory.stored, 0, table.shape[0])
    assert rows.values.dtype == np.float32
    np.testing.assert_array_equal(rows.values, vector.values)
    np.broadcast_to(rows.steps, rows.values.shape)


@pytest.mark.parametrize("name", VECTORS)
def test_any_range_of_rows_is_that_of_the_whole(name: str) -> None:
    vector = VECTORS[name]
    table = vector.memory.recognise(vector.config, vector.metadata)
    assert table is not None
    for start, stop in ((0, 1), (3, 3), (5, 11), (9, 16)):
        values, steps = table.rows(vector.memory.stored, start, stop)
        np.testing.assert_array_equal(values, vector.values[start:stop])
        assert np.broadcast_to(steps, values.shape).shape == values.shape
