"""Diagnostics of an embedding table as a set of V vectors in D dimensions, one function each.

A tied table E (V, D) is used twice: row i is the embedding of token i, and the logits are h E^T. So E E^T decides what
the tie demands of the model. E E^T = I is impossible for V > D (`identity_bound`); E^T E = c I, a tight frame, is
possible (`tight_frame_distance`). Four of the diagnostics are functions of one number, the participation ratio P: P
itself, the frame ratio D / P, the distance from a tight frame sqrt(D / P - 1) and the distance from the identity
sqrt(1 - P / V). IsoScore is a fifth, of the centred rows: (P' - 1) / (D - 1). All are provided, because each has its
own literature.

Every function here follows these rules:

- A table is a (V, D) numpy array or torch tensor of floats or integers, or `Rows` of one, prepared once for several
  diagnostics; anything else is a `UsageError`. A tensor may be on any device and require a gradient: it is detached
  and brought to the CPU, bfloat16 in float32; torch itself is not imported. Half precision is computed in float32.
- Rows with a NaN or an infinity are left out (so are float64 rows beyond 1e150, whose squares overflow). Rows of
  zeros are left out of cosines and self-decoding.
- A figure that is not defined (no rows, a mean over no pairs) is None.
- No V x V matrix is held in memory. Gram matrices are summed in float64 up to 1024 a side and in float32 above;
  scores against all rows are float32.

`describe` computes all of them, with standard errors where a large table is sampled. Self-decoding and the nearest
cosine compare a sample of rows with all rows, never with a sample: too many rows would decode to themselves. The
functions named `gaussian_` give the values of a table of independent Gaussian entries, for comparison.
"""

from __future__ import annotations

from bowline.geometry.cosines import mean_cosine, mean_squared_cosine, welch_bound
from bowline.geometry.diagnostics import GeometryReport, describe, sample_rows, spectrum_rows
from bowline.geometry.gaussian import (
    gaussian_cosine_density,
    gaussian_eigenvalues,
    gaussian_norm_density,
    gaussian_participation_ratio,
)
from bowline.geometry.neighbours import (
    median_nearest_cosine,
    nearest_rows,
    self_decoding_failures,
    self_decoding_rate,
)
from bowline.geometry.norms import Quantiles, row_norm_quantiles
from bowline.geometry.row_neighbours import closest_rows
from bowline.geometry.spectrum import (
    effective_rank,
    frame_ratio,
    identity_bound,
    identity_distance,
    isoscore,
    isotropy,
    participation_ratio,
    tight_frame_distance,
)
from bowline.geometry.table_changes import RowChanges, row_changes
from bowline.geometry.table_checks import Table
from bowline.geometry.table_source import TableSource
from bowline.geometry.usable_rows import Rows

__all__ = [
    "GeometryReport",
    "Quantiles",
    "RowChanges",
    "Rows",
    "Table",
    "TableSource",
    "closest_rows",
    "describe",
    "effective_rank",
    "frame_ratio",
    "gaussian_cosine_density",
    "gaussian_eigenvalues",
    "gaussian_norm_density",
    "gaussian_participation_ratio",
    "identity_bound",
    "identity_distance",
    "isoscore",
    "isotropy",
    "mean_cosine",
    "mean_squared_cosine",
    "median_nearest_cosine",
    "nearest_rows",
    "participation_ratio",
    "row_changes",
    "row_norm_quantiles",
    "sample_rows",
    "self_decoding_failures",
    "self_decoding_rate",
    "spectrum_rows",
    "tight_frame_distance",
    "welch_bound",
]
