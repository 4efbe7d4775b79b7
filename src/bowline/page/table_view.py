"""The numbers of a page about one vocabulary table: norms, spectrum, neighbours, a block of E Eᵀ, a map of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.geometry import Rows, TableSource, closest_rows, spectrum_rows
from bowline.geometry.spectrum import shows_spectrum
from bowline.geometry.table_source import row_blocks

__all__ = ["Ids", "TableView", "view_table"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEIGHBOURS = 8
LOOKUP_COST = 6e11
"""Multiplications that neighbours may cost: all rows of a table of 30,522 x 384, some of a larger one."""
COST_OF_A_SCORE = 256
"""Multiplications that take as long as the comparison of one score with the best so far."""
MOST_LOOKED_UP = 32_000
"""Rows with neighbours, so that a page stays small."""
BLOCK_ROWS = 32
MAPPED_ROWS = 1200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableView:
    """The numbers that a page shows for one table (V, D).

    label, tensor: what the page calls it, and its name in the file.
    norms: of each row (V,), NaN where a row has a NaN or an infinity.
    looked_up: rows whose neighbours were computed, ascending; `neighbours` (n, k) and `cosines` (n, k) are theirs, -1
        and NaN where there are none.
    eigenvalues: of EᵀE in units of their mean, descending; `None` if a sample of the rows does not show them.
    sampled_rows: the rows that they were computed from, if not all.
    block_rows, block: rows spread over the table, and e_i . e_j of each two of them, in units of the mean ||e||².
    mapped, places: rows of the map and their places (n, 2): the two main directions of their centred directions.
    mapped_share: the share of the variance in these two directions.
    """

    label: str
    tensor: str
    shape: tuple[int, int]
    norms: Floats
    looked_up: Ids
    neighbours: Ids
    cosines: Floats
    eigenvalues: Floats | None
    sampled_rows: int | None
    block_rows: Ids
    block: Floats
    mapped: Ids
    places: Floats
    mapped_share: float


def view_table(
    source: TableSource,
    *,
    label: str,
    tensor: str,
    first: npt.ArrayLike = (),
    among: npt.ArrayLike | None = None,
    most: int | None = None,
) -> TableView:
    """Read a table and compute what a page shows of it.

    `first` are the rows that must have neighbours and a place on the map, as far as there is room; the others are
    spread evenly over the table. `among` are the rows that the page lists: only these get neighbours (all by default),
    and at most `most` of them.
    """
    rows, columns = source.shape
    norms, sample = _norms_and_sample(source)
    usable = np.flatnonzero(norms > 0)
    wanted = np.asarray(first, np.int64)
    wanted = wanted[(wanted >= 0) & (wanted < rows)]
    wanted = wanted[norms[wanted] > 0]
    listed = usable if among is None else np.intersect1d(usable, np.asarray(among, np.int64))
    count = int(min(MOST_LOOKED_UP, max(64, LOOKUP_COST / max(1, rows * (columns + COST_OF_A_SCORE)))))
    looked_up = _chosen(wanted, listed, count if most is None else min(count, most))
    neighbours, cosines = closest_rows(source, looked_up, count=NEIGHBOURS)
    held = Rows(sample, total=rows)
    shown = held.count > 1 and shows_spectrum(held)
    eigenvalues = held.eigenvalues()[::-1] if shown else None
    block_rows = _chosen(np.empty(0, np.int64), usable, BLOCK_ROWS)
    mapped = _chosen(wanted, usable, MAPPED_ROWS)
    places, share = _map(source.take(mapped).astype(np.float64), norms[mapped])
    return TableView(
        label=label,
        tensor=tensor,
        shape=(rows, columns),
        norms=norms,
        looked_up=looked_up,
        neighbours=neighbours,
        cosines=cosines,
        eigenvalues=None if eigenvalues is None or not eigenvalues.any() else eigenvalues / eigenvalues.mean(),
        sampled_rows=len(sample) if len(sample) < rows else None,
        block_rows=block_rows,
        block=_block(source.take(block_rows).astype(np.float64), norms[usable]),
        mapped=mapped,
        places=places,
        mapped_share=share,
    )


def _norms_and_sample(source: TableSource) -> tuple[Floats, npt.NDArray[np.floating]]:
    """The norm of each row, and the rows from which the spectrum is computed, in one pass."""
    rows, columns = source.shape
    chosen = spectrum_rows(rows, columns)
    norms = np.full(rows, np.nan)
    parts = []
    for block in row_blocks(source):
        norms[block.places] = block.norms
        parts.append(block.values if chosen is None else block.values[np.isin(block.places, chosen)])
    return norms, np.concatenate(parts) if parts else np.empty((0, columns), np.float32)


def _chosen(first: Ids, others: Ids, count: int) -> Ids:
    """At most `count` rows, ascending: those of `first`, then others spread evenly."""
    first = np.unique(first)[:count]
    rest = np.setdiff1d(others, first, assume_unique=False)
    room = min(count - first.size, rest.size)
    spread = rest[np.linspace(0, rest.size - 1, room).astype(np.int64)] if room > 0 else rest[:0]
    return np.union1d(first, spread)


def _block(rows: Floats, norms: Floats) -> Floats:
    largest = norms.max(initial=0.0)
    if not largest:
        return np.zeros((len(rows), len(rows)))
    scale = np.sqrt(np.mean(np.square(norms / largest)))  # no square overflows, and not all vanish
    scaled = rows / largest / scale
    block: Floats = scaled @ scaled.T
    return block


def _map(rows: Floats, norms: Floats) -> tuple[Floats, float]:
    """The places of rows along the two main directions of their units, centred; and the share of the variance."""
    if len(rows) < 3:
        return np.zeros((len(rows), 2)), 0.0
    units = rows / norms[:, None]
    units -= units.mean(axis=0)
    if len(units) <= units.shape[1]:
        values, vectors = np.linalg.eigh(units @ units.T)
        places = vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0.0))
    else:
        values, vectors = np.linalg.eigh(units.T @ units)
        places = units @ vectors[:, :-3:-1]
    total = float(values.clip(0).sum())
    for axis in range(places.shape[1]):  # the sign of a direction is free: the same table gives the same map
        if places.size and places[np.abs(places[:, axis]).argmax(), axis] < 0:
            places[:, axis] *= -1
    if places.shape[1] < 2:
        places = np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
    return places, float(values[:-3:-1].clip(0).sum() / total) if total > 0 else 0.0
