"""Compares the ends of a tie of which at least one is stored quantised, by their dequantised values."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.difference import FEW, ROWS_NAMED, Cause, TableDifference
from bowline.auditing.quantised_ends import QuantisedEnds
from bowline.auditing.row_scan import MOST_THREADS
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.quantised import QuantisedWeight, StoredBytes
from bowline.checkpoint.formats.quantised.shape_checks import FLOATS, ROUNDING
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import BowlineError, FormatError
from bowline.tie import TieState

__all__ = ["QuantisedComparison", "compare_quantised", "stored_bytes"]

VALUES_AT_ONCE = 1 << 18
BYTES_AT_ONCE = 1 << 22
MOST_BYTES_FETCHED = 1 << 30
"""The largest tensor that is fetched whole from the Hub: packed codes do not stand in the order of rows."""
WITHIN = 1.0
"""A quantiser moves a value by up to half a step, and one at the border of the codes' range by up to a whole one."""
MOST_RMS = 0.4
"""Rounding moves values by 1 / sqrt(12) = 0.29 of a step in the root mean square, whatever the distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedComparison:
    """The state of a tie with a quantised end, `None` if it could not be compared, and what was seen."""

    state: TieState | None
    ends: QuantisedEnds
    difference: TableDifference | None = None
    has_nan: bool = False


@dataclass(slots=True)
class _Tile:
    """What the comparison of some rows found."""

    differing: npt.NDArray[np.int64]
    largest: float
    in_steps: float
    squares: float
    has_nan: bool


def stored_bytes(checkpoint: Checkpoint) -> StoredBytes:
    """Returns the reader of whole tensors: mapped from a local file, fetched once from the Hub.

    It raises `FormatError` for a tensor of more than `MOST_BYTES_FETCHED` bytes that would have to be fetched.
    """
    fetched: dict[StoredTensor, tuple[memoryview, int]] = {}
    local = isinstance(checkpoint.files, LocalDirectory)

    def read(tensor: StoredTensor) -> tuple[memoryview, int]:
        if not local and tensor.nbytes > MOST_BYTES_FETCHED:
            raise FormatError(f"{tensor.name} has {tensor.nbytes} bytes, too many to fetch; download the checkpoint")
        if tensor not in fetched:
            fetched[tensor] = checkpoint.stored_bytes(tensor)
        return fetched[tensor]

    return read


def compare_quantised(
    checkpoint: Checkpoint, ends: QuantisedEnds, target: StoredTensor | None, source: StoredTensor | None
) -> QuantisedComparison:
    """Compare the ends row by row. `target` and `source` are the stored tensors of ends that are not quantised.

    Ends of different layouts count as the same table within its quantisation if no value differs by more than a step,
    and the root mean square of the differences is at most `MOST_RMS` steps. What cannot be compared has a reason.
    """
    try:
        stored = stored_bytes(checkpoint)
        left, right = (
            _reader(checkpoint, quantised, plain, stored)
            for quantised, plain in ((ends.target, target), (ends.source, source))
        )
        shape = ends.shape
        if shape is None:
            raise FormatError("the shape of the quantised end is not known")
        if _same_codes(ends, stored):
            return QuantisedComparison(state=TieState.EQUAL, ends=ends)
        return _compared(ends, left, right, shape)
    except BowlineError as error:
        return QuantisedComparison(state=None, ends=replace(ends, reason=error.message))


Reader = Callable[[int, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Returns the values of rows, and the size of a step at each."""


def _reader(
    checkpoint: Checkpoint, quantised: QuantisedWeight | None, plain: StoredTensor | None, stored: StoredBytes
) -> Reader:
    if quantised is not None:
        return lambda start, stop: quantised.rows(stored, start, stop)
    assert plain is not None
    if plain.dtype not in (*FLOATS, "F64"):
        raise FormatError(f"{plain.name} is {plain.dtype}, and no scales are stored beside it")
    rounding = 2 * ROUNDING[plain.dtype]

    def rows(start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        values = checkpoint.rows(plain.name, start, stop)
        values = values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
        return values, np.abs(values) * values.dtype.type(rounding)

    return rows


def _same_codes(ends: QuantisedEnds, stored: StoredBytes) -> bool:
    """Whether both ends have one layout and equal bytes in every part, NaN-free or not."""
    if not ends.alike or ends.target is None or ends.source is None:
        return False
    mine, theirs = ends.target.parts, ends.source.parts
    if mine.keys() != theirs.keys():
        return False
    return all(_same_bytes(part, theirs[role], stored) for role, part in mine.items())


def _same_bytes(one: StoredTensor, other: StoredTensor, stored: StoredBytes) -> bool:
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes) or one.strides or other.strides:
        return False
    octets = []
    for tensor in (one, other):
        buffer, at = stored(tensor)
        octets.append(np.frombuffer(buffer, np.uint8, tensor.nbytes, at))
    return all(
        np.array_equal(octets[0][at : at + BYTES_AT_ONCE], octets[1][at : at + BYTES_AT_ONCE])
        for at in range(0, one.nbytes, BYTES_AT_ONCE)
    )


def _compared(ends: QuantisedEnds, left: Reader, right: Reader, shape: tuple[int, int]) -> QuantisedComparison:
    rows, columns = shape
    step = max(1, VALUES_AT_ONCE // columns)
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        tiles = list(pool.map(lambda start: _tile(left, right, start, min(start + step, rows)), range(0, rows, step)))
    where = np.concatenate([tile.differing for tile in tiles])
    has_nan = any(tile.has_nan for tile in tiles)
    if not len(where):
        return QuantisedComparison(state=TieState.EQUAL, ends=ends, has_nan=has_nan)
    largest = max(tile.in_steps for tile in tiles)
    spread = sqrt(sum(tile.squares for tile in tiles) / (rows * columns))
    explained = not ends.alike and largest <= WITHIN and spread <= MOST_RMS
    whole = Cause.ALL_ROWS if len(where) > (1 - FEW) * rows else Cause.SOME_ROWS
    difference = TableDifference(
        rows_differing=len(where),
        some_rows=tuple(int(row) for row in where[:ROWS_NAMED]),
        max_abs_difference=max(tile.largest for tile in tiles),
        cause=Cause.QUANTISATION if explained else whole,
        dtype=ends.layouts if explained else None,
    )
    seen = replace(ends, within=largest) if explained else ends
    return QuantisedComparison(state=TieState.DIVERGED, ends=seen, difference=difference, has_nan=has_nan)


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _tile(left: Reader, right: Reader, start: int, stop: int) -> _Tile:
    mine, my_steps = left(start, stop)
    theirs, their_steps = right(start, stop)
    both_nan = np.isnan(mine) & np.isnan(theirs)
    apart = (mine != theirs) & ~both_nan
    has_nan = bool(np.isnan(mine).any() or np.isnan(theirs).any())
    rows = np.flatnonzero(apart.any(axis=1)) + start
    if not len(rows):
        return _Tile(rows, 0.0, 0.0, 0.0, has_nan)
    distance = np.abs(mine.astype(np.float64) - theirs)
    finite = np.isfinite(distance)
    ratio = np.where(apart, distance / (my_steps + their_steps), 0.0)
    in_steps = inf if (apart & ~finite).any() else float(ratio.max())
    return _Tile(
        rows,
        float(distance.max(initial=0.0, where=finite)),
        in_steps,
        float(np.square(ratio).sum()),
        has_nan,
    )
