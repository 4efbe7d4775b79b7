"""Tables that are read in blocks of rows: arrays (also memory-mapped), torch tensors, and tables in a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bowline.errors import UsageError
from bowline.geometry.table_checks import LARGEST_ENTRY, Array, Floats, Indices, Table, floats
from bowline.geometry.torch_tensors import check_holds_values, is_tensor

__all__ = ["RowBlock", "TableSource", "as_source", "row_blocks", "whole_table"]

BLOCK_ENTRIES = 1 << 20
"""Entries of the table that are decoded at a time."""
SAFE_NORMS = 2.0**-60, 2.0**60
"""Rows of float32 between these norms are divided by them in float32, which is faster."""


@runtime_checkable
class TableSource(Protocol):
    """A (V, D) table whose rows are read on request, so that it need not be in memory.

    `rows` returns rows `[start, stop)`, and `take` the rows of these ascending numbers, as a numpy array.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, stop: int) -> Array: ...

    def take(self, chosen: Indices) -> Array: ...


class RowBlock:
    """The usable rows among consecutive rows of a table: `places` in the table, `values` (n, D) and `norms` (n,).

    `wide` are the values in float64, divided by two to the power of `exponents` (n, 1). The exponents are 0 except in
    a float64 table, where squares could vanish.
    """

    def __init__(self, start: int, block: Array) -> None:
        finite = np.isfinite(block).all(axis=1)
        if block.dtype == np.float64:
            finite &= np.abs(block).max(axis=1, initial=0.0) <= LARGEST_ENTRY
        kept = np.flatnonzero(finite)
        self.places: Indices = start + kept
        self.values: Array = block if kept.size == len(block) else block[kept]
        self.wide: Floats = self.values.astype(np.float64)
        self.exponents: Array = np.zeros((len(self.wide), 1), np.int64)
        if block.dtype == np.float64 and self.wide.size:
            self.exponents = np.frexp(np.abs(self.wide).max(axis=1, keepdims=True))[1]
            self.wide = np.ldexp(self.wide, -self.exponents)
        self.scaled_norms: Floats = np.sqrt(np.vecdot(self.wide, self.wide))
        self.norms: Floats = np.ldexp(self.scaled_norms, self.exponents[:, 0])

    def with_direction(self) -> RowBlock:
        """The block without its rows of zeros."""
        kept = np.flatnonzero(self.scaled_norms)
        if kept.size == self.places.size:
            return self
        part: RowBlock = object.__new__(RowBlock)
        for name, value in vars(self).items():
            setattr(part, name, value[kept])
        return part

    def units(self) -> Array:
        """The rows of a block without rows of zeros, scaled to length 1, in float32."""
        low, high = SAFE_NORMS
        if self.values.dtype == np.float32 and self.norms.size and low < self.norms.min() <= self.norms.max() < high:
            unit: Array = self.values * (1.0 / self.norms).astype(np.float32)[:, None]
            return unit
        return (self.wide / self.scaled_norms[:, None]).astype(np.float32)


def row_blocks(source: TableSource, most: int | None = None) -> Iterator[RowBlock]:
    """The table in blocks of at most `most` rows. The blocks depend only on the shape of the table."""
    rows, columns = source.shape
    step = max(1, min(rows if most is None else most, BLOCK_ENTRIES // max(1, columns)))
    for start in range(0, rows, step):
        yield RowBlock(start, floats(source.rows(start, min(start + step, rows))))


def as_source(table: Table | TableSource) -> TableSource:
    """The table as a `TableSource`; raises `UsageError` for anything but a matrix of numbers.

    Example:
        >>> as_source(np.eye(3)).shape
        (3, 3)
    """
    if is_tensor(table):
        check_holds_values(table)
        return _InMemory(table)
    if isinstance(table, TableSource):
        if len(table.shape) != 2:
            raise UsageError(
                f"table: expected two dimensions (rows, hidden_size), got shape {table.shape}",
                help="pass one embedding matrix",
            )
        return table
    return _InMemory(np.asarray(table))


def whole_table(source: TableSource) -> Array:
    """All rows of a table in memory."""
    rows, columns = source.shape
    step = max(1, BLOCK_ENTRIES // max(1, columns))
    first = floats(source.rows(0, min(step, rows)))
    table: Array = np.empty((rows, columns), first.dtype)
    table[:step] = first
    for start in range(step, rows, step):
        table[start : start + step] = source.rows(start, min(start + step, rows))
    return table


class _InMemory:
    """An array or a tensor. Slices are views: nothing is copied before a block is decoded."""

    def __init__(self, table: Any) -> None:
        floats(table[:0] if len(table.shape) == 2 else table)  # refuses what is not a matrix of numbers
        self._table: Any = table
        self.shape: tuple[int, int] = (int(table.shape[0]), int(table.shape[1]))

    def rows(self, start: int, stop: int) -> Array:
        return floats(self._table[start:stop])

    def take(self, chosen: Indices) -> Array:
        return floats(self._table[chosen])
