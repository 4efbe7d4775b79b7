"""Checks the input of diagnostics: a matrix of numbers, row numbers, and the rows that have finite squares."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry.torch_tensors import Tensor, is_tensor, to_numpy

__all__ = ["LARGEST_ENTRY", "Array", "Floats", "Indices", "Table", "floats", "indices", "largest_entry", "usable_rows"]

Array: TypeAlias = npt.NDArray[Any]
Table: TypeAlias = Array | Tensor
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LARGEST_ENTRY = 1e150
"""The square of a float64 entry above this overflows: its row is left out, like a row with an infinity."""


def floats(table: Table) -> Array:
    """The table as float32 or float64, whichever holds its entries; raises `UsageError` for anything else."""
    array = to_numpy(table) if is_tensor(table) else np.asarray(table)
    if array.ndim != 2:
        raise UsageError(
            f"table: expected two dimensions (rows, hidden_size), got shape {array.shape}",
            help="pass one embedding matrix",
        )
    if array.dtype.kind not in "iuf":
        raise UsageError(f"table: expected floats, got {array.dtype}", help="decode the table to float32 first")
    if array.dtype in (np.float32, np.float64):
        return array
    return array.astype(np.float32 if array.dtype == np.float16 else np.float64)


def indices(queries: npt.ArrayLike | Tensor | None, stored: int) -> Indices:
    """The row numbers as an array, checked to be below `stored`; all of them when None."""
    if queries is None:
        return np.arange(stored)
    asked: Array = to_numpy(queries, "queries") if is_tensor(queries) else np.asarray(queries)
    if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu"):
        raise UsageError(
            f"queries: expected a list of row numbers, got {asked.dtype} of shape {asked.shape}",
            help="pass row numbers, or None for all rows",
        )
    if asked.size and not 0 <= int(asked.min()) <= int(asked.max()) < stored:
        raise UsageError(
            f"queries: expected row numbers below {stored}, got {asked.min()} to {asked.max()}",
            help="pass row numbers of this table",
        )
    return asked.astype(np.int64)


def largest_entry(array: Array) -> float:
    """The largest magnitude in the table; NaN if it has a NaN."""
    return float(np.maximum(array.max(), -array.min())) if array.size else 0.0


def usable_rows(array: Array) -> Indices:
    """The rows without a NaN, an infinity or an entry above `LARGEST_ENTRY`."""
    finite = np.flatnonzero(np.isfinite(array).all(axis=1))
    largest = np.abs(array[finite]).max(axis=1, initial=0.0).astype(np.float64)
    usable: Indices = finite[largest <= LARGEST_ENTRY]
    return usable
