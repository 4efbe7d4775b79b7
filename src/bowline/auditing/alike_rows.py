"""Finds groups of rows that are equal up to noise, as the rows of tokens that no training text has become.

Such rows all receive the same gradient, so training leaves them one common direction, whatever their length is. The
sketches of the scan show which rows to compare; the comparison itself reads those rows in full.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bowline.auditing.row_sampling import Ids, held, mean_cosine, take, unit
from bowline.auditing.row_scan import FEWEST_COLUMNS, RowScan
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["find_alike_rows"]

ALIKE = 0.995
"""Cosine to the common direction from which a row belongs to a group.

In SmolLM2-135M-Instruct, 30 of 49,152 rows have a neighbour at a cosine of .98 or more: the 24 of one group, and six
whose cosine to its direction is .984 to .993.
"""
SHARE_OF_SPREAD = 0.05
"""In a table whose rows all point one way, a group is at least this much narrower than the table."""
FEWEST_ALIKE = 4
FEWEST_IN_BUCKET = 3
FEWEST_ROWS = 128
MOST_BUCKETS = 64
MOST_GROUPS = 16
COMPARED = 16
"""Rows of a bucket that are compared with each other."""
BITS_APART = 12
"""Bits of 64 by which the sketch of a member may differ from its group's: four standard errors at the cosine .995."""
HALVES = (np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF << 32))


def find_alike_rows(checkpoint: Checkpoint, scan: RowScan, sound: Ids) -> tuple[Ids, ...]:
    """Groups of at least `FEWEST_ALIKE` of the rows `sound`, the largest first; each row is in one group at most.

    The rows that agree in half of the sketch are candidates. The memory needed is a few bytes for each row, and the
    table is read once more at most for each group; usually only the rows of the groups are read.
    """
    tensor = scan.tensor
    if len(tensor.shape) != 2 or tensor.shape[1] < FEWEST_COLUMNS or len(sound) < FEWEST_ROWS:
        return ()
    at_large = sound[np.linspace(0, len(sound) - 1, held(tensor, FEWEST_ROWS)).astype(np.int64)]
    background = mean_cosine(unit(take(checkpoint, tensor, at_large)))
    threshold = max(ALIKE, 1.0 - SHARE_OF_SPREAD * (1.0 - background))
    free = np.zeros(tensor.shape[0], np.bool_)
    free[sound] = True
    groups: list[Ids] = []
    for bucket in _buckets(scan.sketch, sound):
        bucket = bucket[free[bucket]]
        core = _core(checkpoint, tensor, bucket, threshold)
        if core is None:
            continue
        direction, sketch = core[0], scan.sketch[core[1]]
        near = np.flatnonzero(free & (np.bitwise_count(scan.sketch ^ _majority(sketch)) <= BITS_APART))
        members = np.concatenate(
            [rows[unit(values) @ direction >= threshold] for rows, values in _in_blocks(checkpoint, tensor, near)]
        )
        if len(members) >= FEWEST_ALIKE:
            free[members] = False
            groups.append(members)
            if len(groups) == MOST_GROUPS:
                break
    return tuple(sorted(groups, key=len, reverse=True))


def _buckets(sketch: npt.NDArray[np.uint64], sound: Ids) -> list[Ids]:
    """Rows that agree in one half of the sketch: the `MOST_BUCKETS` largest sets for each half."""
    found: list[Ids] = []
    for half in HALVES:
        keys, counts = np.unique(sketch[sound] & half, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:MOST_BUCKETS]
        found += [sound[sketch[sound] & half == keys[at]] for at in order if counts[at] >= FEWEST_IN_BUCKET]
    return sorted(found, key=len, reverse=True)


def _core(
    checkpoint: Checkpoint, tensor: StoredTensor, bucket: Ids, threshold: float
) -> tuple[npt.NDArray[np.float32], Ids] | None:
    """The mean direction of the rows of a bucket that are alike, and those rows; `None` if they are too few."""
    if len(bucket) < FEWEST_IN_BUCKET:
        return None
    some = bucket[np.linspace(0, len(bucket) - 1, min(held(tensor, COMPARED), len(bucket))).astype(np.int64)]
    rows = unit(take(checkpoint, tensor, some))
    alike = rows @ rows.T >= threshold
    middle = int(alike.sum(axis=1).argmax())
    if alike[middle].sum() < FEWEST_IN_BUCKET:
        return None
    direction = rows[alike[middle]].mean(axis=0)
    return direction / np.linalg.norm(direction), some[alike[middle]]


def _majority(sketches: npt.NDArray[np.uint64]) -> np.uint64:
    """The sketch whose every bit is that of most of the sketches."""
    bits = np.unpackbits(sketches.view(np.uint8).reshape(len(sketches), -1), axis=1)
    majority: np.uint64 = np.packbits(2 * bits.sum(axis=0) > len(sketches)).view(np.uint64)[0]
    return majority


def _in_blocks(
    checkpoint: Checkpoint, tensor: StoredTensor, rows: Ids
) -> Iterator[tuple[Ids, npt.NDArray[np.float32]]]:
    step = held(tensor, 1024)
    for at in range(0, len(rows), step):
        yield rows[at : at + step], take(checkpoint, tensor, rows[at : at + step])
