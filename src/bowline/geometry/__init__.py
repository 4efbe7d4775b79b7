"""What an embedding table looks like as a set of V vectors in D dimensions: one function for each diagnostic.

A tied table E (V, D) is read twice: row i goes in as the embedding of token i, and the logits come out as h E^T. So
what E E^T looks like decides what the tie asks of the model. E E^T = I is impossible for V > D (`identity_bound`);
what can hold is E^T E = c I, a tight frame (`tight_frame_distance`). Four of the diagnostics are one number in four
dresses: with the participation ratio P, the frame ratio is D / P, the distance from a tight frame sqrt(D / P - 1) and
the distance from the identity sqrt(1 - P / V). IsoScore is a fifth, of the centred rows: (P' - 1) / (D - 1). Each is
kept, because each has its own literature.

Shared by every function here:

- A table is a (V, D) numpy array or torch tensor of floats or integers, or `Rows` of one, prepared once for several
  diagnostics; anything else is a `UsageError`. A tensor may be on any device and require a gradient: it is detached
  and brought to the CPU, bfloat16 in float32; torch itself is not imported. Half precision is computed in float32.
- Rows with a NaN or an infinity are left out (so are float64 rows beyond 1e150, whose squares overflow). Rows of
  zeros are left out wherever a cosine or a self-decoding is asked for.
- A figure that is not defined (no rows, a mean over no pairs) is None.
- Nothing of size V x V is ever held. Gram matrices are summed in float64 up to 1024 a side and in float32 above;
  scores against all rows are float32.

`describe` gives them all, of a whole table or of a sample of its rows. What a table of independent Gaussian entries
would give, to hold a figure against, is in the functions named `gaussian_`.
"""

from __future__ import annotations

from bowline.geometry.cosines import mean_cosine, mean_squared_cosine, welch_bound
from bowline.geometry.diagnostics import GeometryReport, describe, sample_rows
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
from bowline.geometry.table_checks import Table
from bowline.geometry.usable_rows import Rows

__all__ = [
    "GeometryReport",
    "Quantiles",
    "Rows",
    "Table",
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
    "row_norm_quantiles",
    "sample_rows",
    "self_decoding_failures",
    "self_decoding_rate",
    "tight_frame_distance",
    "welch_bound",
]
