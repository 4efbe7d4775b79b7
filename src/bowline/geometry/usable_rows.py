"""The usable rows of a table, with the norms, Gram matrix and spectrum that several diagnostics share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError
from bowline.geometry.gram import sum_of_grams
from bowline.geometry.table_checks import (
    LARGEST_ENTRY,
    Array,
    Floats,
    Indices,
    Table,
    floats,
    indices,
    largest_entry,
    usable_rows,
)
from bowline.geometry.table_source import TableSource, as_source, whole_table

__all__ = ["Rows"]

LEAST_KEPT = 0.1
"""The Gram matrix of the centred rows is derived from that of the rows if at least this share of the squared norms
remains; below it the difference would lose digits, and the matrix is summed again."""
BLOCK_ENTRIES = 1 << 20
"""Entries of the table that are widened to float64 at a time (8 MiB)."""


class Rows:
    """The usable rows of a table, prepared once so that several diagnostics share the work.

    Every diagnostic takes a table or its `Rows`. `table` is (V, D); with `total`, it is a uniform sample of a table
    of that many rows, and `participation_ratio` and its relatives are estimated for the whole table. Raises
    `UsageError` for anything but a matrix of floats, or for a `total` below V.

    Example:
        >>> from bowline.geometry import mean_cosine, participation_ratio
        >>> rows = Rows(np.diag([3.0, 2.0, np.inf]))
        >>> rows.count, participation_ratio(rows), mean_cosine(rows)
        (2, 1.7422680412371134, 0.0)
    """

    def __init__(self, table: Table | TableSource, *, total: int | None = None) -> None:
        given = whole_table(table) if isinstance(table, TableSource) else table
        self.source: TableSource = as_source(given)
        array = floats(given)
        self.stored: int = array.shape[0]
        self.hidden_size: int = array.shape[1]
        self.stored_total = self.stored if total is None else total
        if self.stored_total < self.stored:
            raise UsageError(
                f"rows: expected at least the {self.stored} rows given, got {total}",
                help="pass the number of rows of the whole table",
            )
        self._kept: Indices | None = None
        largest = largest_entry(array)
        if not largest <= LARGEST_ENTRY:
            self._kept = usable_rows(array)
            array = array[self._kept]
            largest = largest_entry(array)
        # A power of two scales entries far from 1 to about 1, so that no square overflows or vanishes.
        near_one = largest == 0 or 2.0**-20 < largest < 2.0**20
        self.exponent = 0 if near_one else math.frexp(largest)[1]
        self.array: Array = array if near_one else np.ldexp(array, -self.exponent)
        self.count: int = array.shape[0]
        self.total = self.in_table(self.count)
        squares = [np.einsum("ij,ij->i", block, block) for _, block in self.blocks()]
        self.squared_norms: Floats = np.concatenate([np.empty(0), *squares])
        self.norms: Floats = np.sqrt(self.squared_norms)
        self.lengths: Floats = np.where(self.norms > 0, self.norms, 1.0)
        self.nonzero: Indices = np.flatnonzero(self.norms)
        self.log_partition: Floats | None = None
        self._halves: tuple[Rows, Rows] | None = None
        self._gram: Array | None = None
        self._unit_gram: Array | None = None
        self._eigenvalues: Floats | None = None
        self._vectors: Array | None = None

    @classmethod
    def of(cls, table: Table | TableSource | Rows) -> Rows:
        """The `Rows` of a table; a `Rows` is returned as it is."""
        return table if isinstance(table, Rows) else cls(table)

    @property
    def wide(self) -> bool:
        """Whether there are fewer rows than dimensions, so that E E^T is smaller than E^T E."""
        return self.count < self.hidden_size

    def in_table(self, count: int) -> int:
        """The number of rows of the whole table that `count` of the given rows represent."""
        return round(self.stored_total * count / self.stored) if self.stored else 0

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """The rows in float64, in blocks, each with its place."""
        step = max(1, BLOCK_ENTRIES // max(1, self.hidden_size))
        for start in range(0, self.count, step):
            place = slice(start, min(start + step, self.count))
            yield place, self.array[place].astype(np.float64)

    def unit_blocks(self) -> Iterator[tuple[slice, Floats]]:
        """The blocks with each row scaled to length 1; a row of zeros stays."""
        for place, block in self.blocks():
            block /= self.lengths[place, None]
            yield place, block

    def halves(self) -> tuple[Rows, Rows]:
        """Every other row, as a table of its own, and the rest."""
        if self._halves is None:
            table = np.ldexp(self.array, self.exponent) if self.exponent else self.array
            self._halves = Rows(table[::2]), Rows(table[1::2])
        return self._halves

    def gram(self) -> Array:
        """E^T E (D, D), or E E^T (V, V) when that is smaller: their nonzero eigenvalues are the same."""
        if self._gram is None:
            if self.wide:
                self._gram = sum_of_grams(self._columns(np.zeros(self.hidden_size)), self.count)
            else:
                self._gram = sum_of_grams((block for _, block in self.blocks()), self.hidden_size)
        return self._gram

    def unit_gram(self) -> Array:
        """`gram()` of the rows scaled to length 1; rows of zeros stay."""
        if self._unit_gram is None:
            if self.wide:
                self._unit_gram = self.gram() / self.lengths / self.lengths[:, None]
            else:
                self._unit_gram = sum_of_grams((block for _, block in self.unit_blocks()), self.hidden_size)
        return self._unit_gram

    def eigenvalues(self) -> Floats:
        """The eigenvalues of `gram()`, ascending; those below its resolution are set to 0."""
        if self._eigenvalues is None:
            self._eigenvalues = _above_rounding(np.linalg.eigvalsh(self.gram()))
        return self._eigenvalues

    def spectrum(self) -> tuple[Floats, Array]:
        """The eigenvalues of `gram()`, and its eigenvectors in columns."""
        if self._eigenvalues is None or self._vectors is None:
            eigenvalues, self._vectors = np.linalg.eigh(self.gram())
            self._eigenvalues = _above_rounding(eigenvalues)
        return self._eigenvalues, self._vectors

    def centred(self) -> tuple[Floats, Array]:
        """The squared norms and the Gram matrix of the centred rows; a sample is centred on its own mean.

        Equal rows give exact zeros.
        """
        first = self.array[:1].astype(np.float64)
        offsets = sum(((block - first).sum(axis=0) for _, block in self.blocks()), start=np.zeros(self.hidden_size))
        mean: Floats = first[0] + offsets / self.count
        squares = np.concatenate([np.square(block - mean).sum(axis=1) for _, block in self.blocks()])
        if squares.sum() > LEAST_KEPT * self.squared_norms.sum():
            return squares, self._gram_less(mean)
        if self.wide:
            return squares, sum_of_grams(self._columns(mean), self.count)
        return squares, sum_of_grams((block - mean for _, block in self.blocks()), self.hidden_size)

    def _gram_less(self, mean: Floats) -> Array:
        """The Gram matrix of the centred rows, derived from `gram()` without another pass over the rows."""
        gram = self.gram()
        if self.wide:
            means: Floats = gram.mean(axis=0, dtype=np.float64)
            less = means + means[:, None] - means.mean()
        else:
            less = self.count * np.outer(mean, mean)
        centred: Array = np.subtract(gram, less, dtype=gram.dtype, casting="same_kind")
        return centred

    def _columns(self, less: Floats) -> Iterator[Array]:
        """Blocks of the columns of the rows minus a vector, transposed: (n, V)."""
        step = max(1, BLOCK_ENTRIES // max(1, self.count))
        for start in range(0, self.hidden_size, step):
            columns = self.array[:, start : start + step].astype(np.float64)
            yield (columns - less[start : start + step]).T

    def given(self, positions: Indices) -> Indices:
        """The positions of these usable rows in the given table."""
        return positions if self._kept is None else self._kept[positions]

    def positions(self, queries: npt.ArrayLike | None) -> Indices:
        """The positions of these rows of the table (None: all) among the usable ones; -1 for rows that are left out."""
        asked = indices(queries, self.stored)
        if self._kept is None:
            return asked
        positions = np.full(self.stored, -1, dtype=np.int64)
        positions[self._kept] = np.arange(self.count)
        return positions[asked]

    def have_direction(self, positions: Indices) -> npt.NDArray[np.bool_]:
        """Whether each of these positions is that of a usable row that is not zero."""
        directed = np.append(self.norms > 0, False)  # the last entry is for -1
        return directed[positions]

    def with_direction(self, queries: npt.ArrayLike | None) -> Indices:
        """The positions of the queried rows that are usable and not zero."""
        positions = self.positions(queries)
        return positions[self.have_direction(positions)]


def _above_rounding(eigenvalues: Array) -> Floats:
    """The eigenvalues of a Gram matrix, those below its resolution set to 0."""
    floor = float(np.finfo(eigenvalues.dtype).eps) * float(eigenvalues.max(initial=0.0))
    return np.where(eigenvalues > floor, eigenvalues, 0.0).astype(np.float64)
