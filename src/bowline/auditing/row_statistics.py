"""Classifies the rows of a table: zero, not finite, duplicate, never trained, of odd norm; and the padding row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from bowline.auditing.alike_rows import find_alike_rows
from bowline.auditing.odd_norms import OddNorms, find_odd_norms
from bowline.auditing.row_sampling import Ids, held, mean_cosine, take, unit
from bowline.auditing.row_scan import RowScan
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["PaddingClass", "PaddingRow", "TableRows", "classify_padding", "describe_table"]

SEED_SHARE = 0.004
FEWEST_SEEDS, MOST_SEEDS = 16, 256
COHERENT = 0.4
"""Mean cosine of the shortest rows from which they count as having one direction, as never-trained rows have."""
SHORT = 0.9
"""The shortest rows count as short if they are below this share of the median length."""
MOST_CANDIDATES = 16384
MOST_DUPLICATES = 65536
STANDARD_ERRORS = 4.0


class PaddingClass(StrEnum):
    """The classes of padding rows; each has its own consequence under a tied head."""

    ZERO = "zero"
    MEAN = "mean"
    COPY = "copy"
    INIT_LIKE = "init-like"
    TRAINED = "trained"
    NOT_FINITE = "not-finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """The id and the class of the padding row; `copy_of` is the row that it repeats."""

    id: int
    row_class: PaddingClass
    copy_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Row ids of one table by class. Duplicates are groups of two or more rows."""

    name: str
    rows: int
    zero: Ids
    not_finite: Ids
    duplicates: tuple[tuple[int, ...], ...]
    never_trained: Ids
    """Short rows that point in one direction."""
    alike: tuple[Ids, ...]
    """Groups of rows of any length that are equal up to noise, the largest first."""
    drawn_std: float | None
    """The standard deviation of the draw, if all rows have the lengths of a fresh draw (an untrained table)."""
    norms_estimated_from: int | None
    odd_norms: OddNorms | None = None
    """Rows whose norms fall out of the table's distribution, those of other classes left out or named apart."""


def describe_table(checkpoint: Checkpoint, scan: RowScan) -> TableRows:
    """Classify the rows of a scanned table."""
    zero, not_finite = scan.zero, scan.not_finite
    sound = ~(zero | not_finite)
    norm = scan.norm
    duplicates = _duplicates(checkpoint, scan.tensor, scan.fingerprint, np.flatnonzero(sound))
    never_trained = _never_trained(checkpoint, scan.tensor, norm, np.flatnonzero(sound))
    alike = find_alike_rows(checkpoint, scan, np.flatnonzero(sound))
    grouped = np.zeros_like(sound)
    for found in (*alike, *duplicates):
        grouped[np.asarray(found, np.int64)] = True
    bulk = sound & ~grouped
    bulk[never_trained] = False
    return TableRows(
        name=scan.tensor.name,
        rows=len(zero),
        zero=np.flatnonzero(zero),
        not_finite=np.flatnonzero(not_finite),
        duplicates=duplicates,
        never_trained=never_trained,
        alike=alike,
        drawn_std=_drawn_std(norm[sound], scan),
        norms_estimated_from=scan.norm_columns,
        odd_norms=find_odd_norms(checkpoint, scan, np.flatnonzero(bulk), np.flatnonzero(grouped)),
    )


def _duplicates(
    checkpoint: Checkpoint, tensor: StoredTensor, fingerprint: npt.NDArray[np.uint64], sound: Ids
) -> tuple[tuple[int, ...], ...]:
    """Groups of equal rows: rows of equal fingerprint whose bytes also have equal digests."""
    values, counts = np.unique(fingerprint[sound], return_counts=True)
    suspects = sound[np.isin(fingerprint[sound], values[counts > 1])][:MOST_DUPLICATES]
    groups: dict[bytes, list[int]] = {}
    for row in map(int, suspects):
        digest = hashlib.blake2b(np.ascontiguousarray(checkpoint.rows(tensor.name, row, row + 1)).tobytes()).digest()
        groups.setdefault(digest, []).append(row)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _never_trained(checkpoint: Checkpoint, tensor: StoredTensor, norm: npt.NDArray[np.float32], sound: Ids) -> Ids:
    """Rows that gradients only pushed in one common direction (Land and Bartolo 2024, after Gao et al. 2019).

    The shortest rows are the seeds. If their mean pairwise cosine is high and that of rows across the whole table is
    not, short rows that point in the direction of the seeds look never trained. A freshly drawn table has none.
    """
    nothing = np.empty(0, np.int64)
    seeds_wanted = held(tensor, min(MOST_SEEDS, max(FEWEST_SEEDS, int(SEED_SHARE * len(sound)))))
    if len(tensor.shape) != 2 or len(sound) < 8 * seeds_wanted:
        return nothing
    order = sound[np.argsort(norm[sound], kind="stable")]
    if norm[order[seeds_wanted - 1]] > SHORT * np.median(norm[sound]):
        return nothing
    seeds = unit(take(checkpoint, tensor, order[:seeds_wanted]))
    at_large = unit(take(checkpoint, tensor, order[np.linspace(0, len(order) - 1, seeds_wanted).astype(np.int64)]))
    coherence, background = mean_cosine(seeds), mean_cosine(at_large)
    if coherence < COHERENT or coherence < 2 * background:
        return nothing
    direction = seeds.mean(axis=0)
    direction /= np.linalg.norm(direction)
    towards = seeds @ direction
    longest = 1.5 * float(norm[order[seeds_wanted - 1]])
    candidates = order[: int(np.searchsorted(norm[order], longest, side="right"))][:MOST_CANDIDATES]
    threshold = 0.9 * float(np.median(towards))
    step = held(tensor, 1024)
    cosine = np.concatenate(
        [
            unit(take(checkpoint, tensor, candidates[at : at + step])) @ direction
            for at in range(0, len(candidates), step)
        ]
    )
    return np.sort(candidates[cosine >= threshold])


def classify_padding(
    checkpoint: Checkpoint, scan: RowScan, table: TableRows, pad: int, config_std: float | None
) -> PaddingRow:
    """Classify the padding row: not finite, zero, a copy, the table's mean, drawn but never trained, or trained."""
    if scan.not_finite[pad]:
        return PaddingRow(id=pad, row_class=PaddingClass.NOT_FINITE)
    if scan.zero[pad]:
        return PaddingRow(id=pad, row_class=PaddingClass.ZERO)
    for group in table.duplicates:
        if pad in group:
            other = next(row for row in group if row != pad)
            return PaddingRow(id=pad, row_class=PaddingClass.COPY, copy_of=other)
    row = checkpoint.rows(scan.tensor.name, pad, pad + 1)[0].astype(np.float64)
    if _is_mean(checkpoint, scan, pad, row):
        return PaddingRow(id=pad, row_class=PaddingClass.MEAN)
    if any(std and _looks_drawn(row, std) for std in (table.drawn_std, config_std)):
        return PaddingRow(id=pad, row_class=PaddingClass.INIT_LIKE)
    return PaddingRow(id=pad, row_class=PaddingClass.TRAINED)


def _is_mean(checkpoint: Checkpoint, scan: RowScan, pad: int, row: npt.NDArray[np.float64]) -> bool:
    """Whether a row is the mean of the others, up to sampling and rounding error, as rows added by resizing are."""
    sound = np.flatnonzero(~(scan.zero | scan.not_finite))
    sound = sound[sound != pad]
    if len(sound) < 2:
        return False
    chosen = sound[np.linspace(0, len(sound) - 1, min(held(scan.tensor, 2048), len(sound))).astype(np.int64)]
    sample = take(checkpoint, scan.tensor, chosen).astype(np.float64)
    mean, spread = sample.mean(axis=0), sample.std(axis=0)
    error = STANDARD_ERRORS * spread / np.sqrt(len(chosen)) + 2.0**-8 * np.abs(mean)
    short = float(np.linalg.norm(row)) < 0.5 * float(np.median(np.linalg.norm(sample, axis=1)))
    return short and bool((np.abs(row - mean) <= error + 1e-12).mean() > 0.99)


def _drawn_std(norm: npt.NDArray[np.float32], scan: RowScan) -> float | None:
    """The standard deviation r of the draw if the table looks untrained, else `None`.

    Row norms of N(0, r^2) have mean r sqrt(D) and spread r / sqrt(2) for every D, so nearly all are close to the mean.
    """
    if len(scan.tensor.shape) != 2 or len(norm) < FEWEST_SEEDS:
        return None
    columns = scan.tensor.shape[1]
    seen = columns if scan.norm_columns is None else scan.norm_columns
    middle = float(np.median(norm))
    spread = middle / np.sqrt(2.0 * seen)
    near = np.abs(norm - middle) <= STANDARD_ERRORS * spread
    return middle / float(np.sqrt(columns)) if near.mean() > 0.99 else None


def _looks_drawn(row: npt.NDArray[np.float64], std: float) -> bool:
    """Whether the row has mean 0 and standard deviation `std`, up to the sampling error of its length."""
    count = len(row)
    near_scale = abs(row.std() / std - 1.0) <= STANDARD_ERRORS / np.sqrt(2.0 * count)
    near_zero = abs(row.mean()) <= STANDARD_ERRORS * std / np.sqrt(count)
    return count >= 16 and bool(near_scale and near_zero)
