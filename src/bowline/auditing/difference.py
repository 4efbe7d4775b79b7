"""Describes how two tables that should be equal differ, and what the difference looks like."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import hypot, isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.row_scan import PairScan, rounded
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf.ggml_types import DEQUANTISED
from bowline.checkpoint.formats.graphs import SCALED
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["Cause", "TableDifference", "explain_difference"]

ROWS_NAMED = 8
SAMPLE_ROWS = 512
SAMPLE_COLUMNS = 1024
FEW = 0.1
"""Up to this share, the differing rows count as a few rows, not as the whole table."""
LARGEST_RANK = 128
LARGEST_SHARE = 0.01
"""The most that rounding may hold of the energy of a difference that is called low-rank."""
UNEXPLAINED = 1.5
"""The energy beyond the rank may be this multiple of what rounding is expected to leave there."""
GAP = 4.0
"""The last singular value that counts is at least this multiple of the next,"""
STEEPER = 2.0
"""and this multiple of the steepest drop before it: otherwise further ones may be hidden by rounding."""
GAP_AFTER_ONE = 1000.0
"""The gap after a single one: the second of an adapter may be this much smaller, and hidden."""
SMOOTH = 4.0
"""The first singular value of rounding is at most this multiple of the second; a large column rounds more coarsely."""
BLOCK_NOISE = {
    **dict.fromkeys(("F64", "F32", "F16", "BF16"), 0.004),
    "Q8_0": 0.01,
    "Q6_K": 0.03,
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.065),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS"), 0.13),
    "Q3_K": 0.25,
    "Q2_K": 0.45,
}
"""The most that a type of GGUF changes a trained table, as the norm of the change over that of the table: one and a
half times what it does to normally distributed rows."""
HALF_STEP = 0.505
"""Rounding to codes moves a number by at most half a step of their scale; the rest is for rounding the scale itself."""
SPACING = {"F64": 2.0**-52, "F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
"""Distance between neighbouring numbers at 1.0."""


class Cause(StrEnum):
    """The likely cause of a difference between two tables."""

    ADDED_TOKENS = "added tokens"
    LOW_RANK = "a merged low-rank delta"
    ROUNDING = "noise from a cast"
    QUANTISATION = "the same table"
    SOME_ROWS = "some rows"
    ALL_ROWS = "all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """The number of rows that differ, the first of them, the largest difference, and its likely cause.

    `rank` is the numerical rank of a low-rank delta; `dtype` is the dtype that a cast went through, or the coarser type
    of a table that a GGUF file has in two.
    """

    rows_differing: int
    some_rows: tuple[int, ...]
    max_abs_difference: float
    cause: Cause
    rank: int | None = None
    dtype: str | None = None

    @property
    def has_pattern(self) -> bool:
        """Whether the cause names an operation, such as a cast, and not only how many rows differ."""
        return self.cause not in (Cause.SOME_ROWS, Cause.ALL_ROWS)

    @property
    def extent(self) -> str:
        """The largest difference in words; it is unknown (NaN) for codes whose scale is unknown."""
        unknown = isnan(self.max_abs_difference)
        return "by an unknown amount" if unknown else f"by at most {self.max_abs_difference:.3g}"

    def __str__(self) -> str:
        through = "quantised to" if self.cause is Cause.QUANTISATION else "through"
        detail = f" of rank {self.rank}" if self.rank else f" {through} {self.dtype}" if self.dtype else ""
        return f"{self.cause.value}{detail}"


def explain_difference(checkpoint: Checkpoint, pair: PairScan, source: StoredTensor) -> TableDifference | None:
    """Describe the difference of a scanned pair of tables; `None` when no row differs.

    The singular values of a sample of rows separate a low-rank delta from noise and from training: few of them hold all
    of the difference but what rounding explains. The cause is a guess, so reports say "looks like".
    """
    where = np.flatnonzero(pair.differs)
    if not len(where):
        return None
    rows = len(pair.differs)
    cause, rank, dtype = Cause.ALL_ROWS if len(where) > (1 - FEW) * rows else Cause.SOME_ROWS, None, None
    if where[0] > 0 and len(where) <= FEW * rows and where[-1] == rows - 1 and where[-1] - where[0] + 1 == len(where):
        cause = Cause.ADDED_TOKENS
    elif len(source.shape) == 2:
        target_rows, source_rows = _samples(checkpoint, pair.tensor, source, where)
        dtypes = (pair.tensor.dtype, source.dtype)
        dtype = _cast_through(target_rows, source_rows)
        coarser = None if dtype else _codes_of(checkpoint, pair, source)
        coarser = coarser if dtype or coarser else _quantised_to(target_rows, source_rows, dtypes)
        rank = None if dtype or coarser else _low_rank(target_rows, source_rows, dtypes)
        cause = Cause.ROUNDING if dtype else Cause.QUANTISATION if coarser else Cause.LOW_RANK if rank else cause
        dtype = dtype or coarser
    return TableDifference(
        rows_differing=len(where),
        some_rows=tuple(int(row) for row in where[:ROWS_NAMED]),
        max_abs_difference=pair.max_abs_difference,
        cause=cause,
        rank=rank,
        dtype=dtype,
    )


Rows = npt.NDArray[Any]


def _samples(
    checkpoint: Checkpoint, target: StoredTensor, source: StoredTensor, where: npt.NDArray[np.int64]
) -> tuple[Rows, Rows]:
    chosen = where[np.linspace(0, len(where) - 1, min(SAMPLE_ROWS, len(where))).astype(np.int64)]
    left, right = (
        np.stack(
            [  # a copy of the used columns: a view would keep the whole row in memory
                checkpoint.rows(tensor.name, row, row + 1)[0, :SAMPLE_COLUMNS].astype(np.float64)
                for row in map(int, chosen)
            ]
        )
        for tensor in (target, source)
    )
    finite = np.isfinite(left).all(axis=1) & np.isfinite(right).all(axis=1)
    return left[finite], right[finite]


def _cast_through(target: Rows, source: Rows) -> str | None:
    """The dtype, F16 or BF16, in which one table is the rounded values of the other; `None` if neither is."""
    for dtype in ("F16", "BF16"):
        if target.size and (
            np.array_equal(rounded(target, dtype), target) and np.array_equal(rounded(source, dtype), target)
        ):
            return dtype
        if target.size and (
            np.array_equal(rounded(source, dtype), source) and np.array_equal(rounded(target, dtype), source)
        ):
            return dtype
    return None


def _codes_of(checkpoint: Checkpoint, pair: PairScan, source: StoredTensor) -> str | None:
    """The type of the codes of a graph if their rounding explains every difference; `None` if it does not."""
    if checkpoint.graph is None:
        return None
    codes = [tensor for tensor in (pair.tensor, source) if tensor.dtype in SCALED]
    scales = [checkpoint.rows(checkpoint.graph.scaling[tensor.name].scale) for tensor in codes]
    steps = sum(float(np.abs(scale.astype(np.float64)).max(initial=0)) for scale in scales)
    return codes[0].dtype if codes and pair.max_abs_difference <= HALF_STEP * steps else None


def _quantised_to(target: Rows, source: Rows, dtypes: tuple[str, str]) -> str | None:
    """The coarser of two types of GGUF if quantisation explains the difference; `None` if it does not."""
    if dtypes[0] == dtypes[1] or not set(dtypes) & DEQUANTISED or not source.size:
        return None
    noise = [BLOCK_NOISE.get(dtype, 0.0) for dtype in dtypes]
    norm = min(float(np.linalg.norm(target)), float(np.linalg.norm(source)))
    explained = float(np.linalg.norm(target - source)) <= hypot(*noise) * norm
    return max(dtypes, key=lambda dtype: BLOCK_NOISE.get(dtype, 0.0)) if explained else None


def _low_rank(target: Rows, source: Rows, dtypes: tuple[str, str]) -> int | None:
    """The rank of the difference of two tables if rounding explains all of its energy beyond that rank, else `None`.

    A delta that was added to a table has been rounded once with the sum, to the dtype of either table, and perhaps
    before, to the dtype that the delta was computed in. The finest pair of dtypes that explains the rest decides.
    A difference left by training has a spectrum that decreases steadily: beyond any rank is more than rounding leaves,
    or the singular values do not drop there.
    """
    rows, columns = target.shape
    delta = target - source
    if min(rows, columns) < 8 or not np.isfinite(delta).all():  # two numbers at opposite ends of float64's range
        return None
    largest = float(np.abs(delta).max())
    if not largest:
        return None
    exponent = int(np.frexp(largest)[1])
    delta = np.ldexp(delta, -exponent)  # so that no square overflows or vanishes
    singular = np.linalg.svd(delta, compute_uv=False)
    grids = {_grid(target, dtypes[0]): target, _grid(source, dtypes[1]): source}
    for grid in sorted(grids, key=lambda dtype: SPACING.get(dtype, 2.0**-7)):
        stored = np.square(np.ldexp(_spacing(grids[grid], grid), -exponent)) / 12
        for computed in ("F32", "F16", "BF16"):
            # Up to four roundings: of each factor's product, the scaled delta, and a change of dtype.
            noise = stored + 4 * np.square(SPACING[computed] * delta) / 12
            rank = _rank_above(singular, noise)
            if rank is not None:
                return rank
    return None


def _rank_above(singular: npt.NDArray[np.float64], noise: Rows) -> int | None:
    """The number of singular values that stand out from independent errors of these variances, if nothing else does."""
    # The norm of a matrix of independent entries (Bandeira and van Handel, 2016), with a tenth for its spread.
    edge = 1.1 * float(np.sqrt(noise.sum(axis=1).max()) + np.sqrt(noise.sum(axis=0).max()))
    rank = int((singular > edge).sum())
    if not 0 < rank <= min(LARGEST_RANK, len(singular) // 4):
        return None
    energies = np.square(singular)
    beyond = float(energies[rank:].sum())
    explained = beyond <= UNEXPLAINED * float(noise.sum()) and beyond <= LARGEST_SHARE * float(energies.sum())
    steepest = float((singular[: rank - 1] / singular[1:rank]).max(initial=1.0))
    gap = GAP_AFTER_ONE if rank == 1 else max(GAP, STEEPER * steepest)
    drops = singular[rank - 1] >= gap * singular[rank]
    smooth = singular[rank] <= max(SMOOTH * singular[rank + 1], 1e-12 * singular[0])  # the latter: of the SVD itself
    return rank if explained and drops and smooth else None


def _grid(values: Rows, dtype: str) -> str:
    """The dtype whose numbers these are: a shorter one than they are stored in, if all of them fit."""
    for shorter in ("BF16", "F16"):
        if SPACING.get(dtype, 1.0) < SPACING[shorter] and np.array_equal(rounded(values, shorter), values):
            return shorter
    return dtype


def _spacing(values: Rows, dtype: str) -> Rows:
    """The distance of each value from the next number of its dtype."""
    exponents = np.frexp(values)[1] - 1
    if dtype == "F16":
        exponents = np.maximum(exponents, -14)  # subnormal numbers are equally far apart
    spacing: Rows = np.ldexp(SPACING.get(dtype, 2.0**-7), exponents)
    return spacing
