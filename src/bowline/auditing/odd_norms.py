"""Finds rows whose norms fall out of a table's distribution, such as those of tokens added as the mean of the others.

Norms are held against the bulk of the same table: its median, and its 5% and 95% quantiles. In a wide table of
independent Gaussian entries the fences lie 5.8 standard deviations below the median and 9.9 above it. The upper fence
is farther out because trained tables have a longer tail there. Where the lower tail is long as well, as in narrow
tables, the lower fence is set on a logarithmic scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.auditing.row_sampling import Ids, held, take
from bowline.auditing.row_scan import RowScan
from bowline.checkpoint.checkpoint import Checkpoint

__all__ = ["OddNorms", "find_odd_norms"]

FEWEST_ROWS = 256
TAIL = 0.05
BELOW, ABOVE, BELOW_IN_LOG = 3.5, 6.0, 6.0
"""The fences, in distances between the median and the quantile of its side; the lower of two fences does not count.

In SmolLM2 the shortest row lies at 1.8 of these distances (2.0 on a logarithmic scale) and the longest at 4.2; in
MiniLM the shortest trained row at 2.6 (4.3) and the longest at 2.6.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddNorms:
    """Rows with norms outside the distribution: far below the median of the others, or far above it."""

    short: Ids
    long: Ids
    short_norms: npt.NDArray[np.float32]
    """The norm of each short row."""
    long_norms: npt.NDArray[np.float32]
    grouped: Ids
    """Short rows among those that are equal, or equal up to noise."""
    grouped_norms: npt.NDArray[np.float32]
    median: float


def find_odd_norms(checkpoint: Checkpoint, scan: RowScan, bulk: Ids, grouped: Ids) -> OddNorms | None:
    """The rows of odd norm, or `None` if there are none.

    `bulk` are the rows that nothing else was found about, `grouped` those that are equal, or equal up to noise.

    Norms that the scan estimated from some columns are computed again from all columns before a row counts as odd.
    """
    if len(scan.tensor.shape) != 2 or len(bulk) < FEWEST_ROWS:
        return None
    norm = scan.norm
    low, median, high = (float(value) for value in np.quantile(norm[bulk], [TAIL, 0.5, 1 - TAIL]))
    if not np.isfinite(high):
        return None
    least = max(median - BELOW * (median - low), median * (low / median) ** BELOW_IN_LOG)
    most = median + ABOVE * (high - median)
    short, long = bulk[norm[bulk] < least], bulk[norm[bulk] > most]
    alike = grouped[norm[grouped] < least]
    if scan.norm_columns is not None:
        alike = alike[_norms(checkpoint, scan, alike) < least]
        short = short[_norms(checkpoint, scan, short) < least]
        long = long[_norms(checkpoint, scan, long) > most]
    if not len(short) and not len(long) and not len(alike):
        return None
    return OddNorms(
        short=short,
        long=long,
        short_norms=_norms(checkpoint, scan, short),
        long_norms=_norms(checkpoint, scan, long),
        grouped=alike,
        grouped_norms=_norms(checkpoint, scan, alike),
        median=median,
    )


def _norms(checkpoint: Checkpoint, scan: RowScan, rows: Ids) -> npt.NDArray[np.float32]:
    """Norms from all columns."""
    if scan.norm_columns is None or not len(rows):
        return scan.norm[rows]
    step = held(scan.tensor, 1024)
    parts = [
        np.linalg.norm(take(checkpoint, scan.tensor, rows[at : at + step]), axis=1) for at in range(0, len(rows), step)
    ]
    norms: npt.NDArray[np.float32] = np.concatenate(parts)
    return norms
