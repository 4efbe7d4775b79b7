"""What an embedding table looks like as a set of V vectors in D dimensions: one function for each diagnostic.

A tied table E (V, D) is read twice: row i goes in as the embedding of token i, and the logits come out as h E^T. So
what E E^T looks like decides what the tie asks of the model. E E^T = I is impossible for V > D (`identity_bound`);
what can hold is E^T E = c I, a tight frame (`tight_frame_distance`). Four of the diagnostics are one number in four
dresses: with the participation ratio P, the frame ratio is D / P, the distance from a tight frame sqrt(D / P - 1) and
the distance from the identity sqrt(1 - P / V). Each is kept, because each has its own literature.

Shared by every function here:

- A table is a (V, D) array of floats or integers, or `Rows` of one, prepared once for several diagnostics; anything
  else is a `UsageError`.
- Rows with a NaN or an infinity are left out (so are float64 rows beyond 1e150, whose squares overflow). Rows of
  zeros are left out wherever a cosine or a self-decoding is asked for.
- A figure that is not defined (no rows, a mean over no pairs) is None.
- Nothing of size V x V is ever held. Gram matrices are summed in float64 up to 1024 a side and in float32 above;
  scores against all rows are float32.

`describe` gives them all, of a whole table or of a sample of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError

__all__ = [
    "GeometryReport",
    "Quantiles",
    "Rows",
    "Table",
    "describe",
    "effective_rank",
    "frame_ratio",
    "identity_bound",
    "identity_distance",
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

Table = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LARGEST_ENTRY = 1e150
"""A float64 entry above this has no finite square: its row is left out like one with an infinity."""
FLOAT64_GRAM = 1024
"""The largest side of a Gram matrix that is summed in float64."""
BLOCK_ENTRIES = 1 << 20
"""Entries of the table that are widened to float64 at a time (8 MiB)."""
SCORE_ENTRIES = 1 << 23
"""Scores of queries against rows that are held at a time (32 MiB)."""
QUERY_PRODUCTS = 6_000_000_000
"""Multiplications that `describe` spends on scores: 512 queries against a table of 30522 x 384."""
LEAST_QUERIES = 256
"""Rows that it asks about however many rows there are."""
SPECTRUM_ROWS = 2
"""A sample shows the spectrum of a table from this many rows for each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Minimum, 5%, 50% and 95% quantile, and maximum.

    Example:
        >>> Quantiles(min=0.0, p5=0.1, p50=0.5, p95=0.9, max=1.0).p50
        0.5
    """

    min: float
    p5: float
    p50: float
    p95: float
    max: float


class Rows:
    """The usable rows of a table, prepared once so that several diagnostics share the work.

    Every diagnostic takes a table or its `Rows`. `table` is (V, D); with `total`, it is a uniform sample of a table
    of that many rows, and `participation_ratio` and its kin estimate the whole table's. Raises `UsageError` for what
    is not a matrix of floats, or a `total` below V.

    Example:
        >>> rows = Rows(np.diag([3.0, 2.0, np.inf]))
        >>> rows.count, participation_ratio(rows), mean_cosine(rows)
        (2, 1.7422680412371134, 0.0)
    """

    def __init__(self, table: Table, *, total: int | None = None) -> None:
        array = _floats(table)
        self.stored: int = array.shape[0]
        self.hidden_size: int = array.shape[1]
        self.stored_total = self.stored if total is None else total
        if self.stored_total < self.stored:
            raise UsageError(
                f"rows: expected at least the {self.stored} rows given, got {total}",
                help="pass the number of rows of the whole table",
            )
        self._kept: Indices | None = None
        largest = _largest_entry(array)
        if not largest <= LARGEST_ENTRY:
            self._kept = _usable_rows(array)
            array = array[self._kept]
            largest = _largest_entry(array)
        # Entries far from 1 are brought there by a power of two, so that no square overflows or vanishes.
        near_one = largest == 0 or 2.0**-20 < largest < 2.0**20
        self.exponent = 0 if near_one else math.frexp(largest)[1]
        self.array: Table = array if near_one else np.ldexp(array, -self.exponent)
        self.count: int = array.shape[0]
        self.total = self.in_table(self.count)
        squares = [np.einsum("ij,ij->i", block, block) for _, block in self.blocks()]
        self.squared_norms: Floats = np.concatenate([np.empty(0), *squares])
        self.norms: Floats = np.sqrt(self.squared_norms)
        self.lengths: Floats = np.where(self.norms > 0, self.norms, 1.0)
        self.nonzero: Indices = np.flatnonzero(self.norms)
        self._gram: Table | None = None
        self._spectrum: tuple[Floats, Table] | None = None

    @classmethod
    def of(cls, table: Table | Rows) -> Rows:
        """Itself, or the rows of this table."""
        return table if isinstance(table, Rows) else cls(table)

    @property
    def wide(self) -> bool:
        """Fewer rows than dimensions: E E^T is smaller than E^T E."""
        return self.count < self.hidden_size

    def in_table(self, count: int) -> int:
        """How many rows of the whole table this many of the rows given stand for."""
        return round(self.stored_total * count / self.stored) if self.stored else 0

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """The rows in float64, some at a time, with their place."""
        step = max(1, BLOCK_ENTRIES // max(1, self.hidden_size))
        for start in range(0, self.count, step):
            place = slice(start, min(start + step, self.count))
            yield place, self.array[place].astype(np.float64)

    def unit_blocks(self) -> Iterator[tuple[slice, Floats]]:
        """The same, each row brought to length 1; a row of zeros stays."""
        for place, block in self.blocks():
            block /= self.lengths[place, None]
            yield place, block

    def gram(self) -> Table:
        """E^T E (D, D), or E E^T (V, V) when that is smaller: their nonzero eigenvalues are the same."""
        if self._gram is None:
            if self.wide:
                step = max(1, BLOCK_ENTRIES // max(1, self.count))
                parts = (self.array[:, start : start + step].T for start in range(0, self.hidden_size, step))
                self._gram = _sum_of_grams(parts, self.count)
            else:
                self._gram = _sum_of_grams((block for _, block in self.blocks()), self.hidden_size)
        return self._gram

    def spectrum(self) -> tuple[Floats, Table]:
        """The eigenvalues of `gram()`, ascending, those below its resolution as 0, and its eigenvectors in columns."""
        if self._spectrum is None:
            gram = self.gram()
            eigenvalues, vectors = np.linalg.eigh(gram)
            floor = float(np.finfo(gram.dtype).eps) * float(eigenvalues.max(initial=0.0))
            self._spectrum = np.where(eigenvalues > floor, eigenvalues, 0.0).astype(np.float64), vectors
        return self._spectrum

    def given(self, positions: Indices) -> Indices:
        """Where these of the usable rows are in the table as it was given."""
        return positions if self._kept is None else self._kept[positions]

    def positions(self, queries: npt.ArrayLike | None) -> Indices:
        """Where these rows of the table (None: all) are among the usable ones; -1 for a row that was left out."""
        asked = _indices(queries, self.stored)
        if self._kept is None:
            return asked
        positions = np.full(self.stored, -1, dtype=np.int64)
        positions[self._kept] = np.arange(self.count)
        return positions[asked]

    def have_direction(self, positions: Indices) -> npt.NDArray[np.bool_]:
        """Which of these positions are of usable rows that are not zero."""
        directed = np.append(self.norms > 0, False)  # the last is for -1
        return directed[positions]

    def with_direction(self, queries: npt.ArrayLike | None) -> Indices:
        """The positions of those of the queried rows that are usable and not zero."""
        positions = self.positions(queries)
        return positions[self.have_direction(positions)]


# Row norms


def row_norm_quantiles(table: Table | Rows) -> Quantiles | None:
    """The quantiles of ||e_i|| over the V rows of E (V, D); each in [0, inf).

    A tied row that was never trained stands out by its norm. None without rows.

    Example:
        >>> row_norm_quantiles(np.array([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])).max
        5.0
    """
    rows = Rows.of(table)
    if not rows.count:
        return None
    values = np.quantile(np.ldexp(rows.norms, rows.exponent), (0.0, 0.05, 0.5, 0.95, 1.0))
    least, low, middle, high, most = (float(value) for value in values)
    return Quantiles(min=least, p5=low, p50=middle, p95=high, max=most)


# Cosines over pairs


def mean_cosine(table: Table | Rows) -> float | None:
    """The mean of cos(e_i, e_j) over the pairs i != j, in [-1 / (V - 1), 1].

    Exact in O(V D), through the sum of the normalised rows u_i: (||sum_i u_i||^2 - V) / (V (V - 1)). Near 1 when the
    rows lie in a narrow cone (Gao et al., "Representation Degeneration Problem", 2019; Ethayarajh, 2019). None for
    fewer than two rows.

    Example:
        >>> mean_cosine(np.array([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))  # pairs: 1, 0, 0
        0.3333333333333333
    """
    rows = Rows.of(table)
    count = rows.nonzero.size
    if count < 2:
        return None
    total = sum((block.sum(axis=0) for _, block in rows.unit_blocks()), start=np.zeros(rows.hidden_size))
    return min(1.0, (float(total @ total) - count) / (count * (count - 1)))


def mean_squared_cosine(table: Table | Rows) -> float | None:
    """The mean of cos(e_i, e_j)^2 over the pairs i != j, in [`welch_bound`, 1].

    Exact in O(V D min(V, D)), through the Gram matrix U^T U of the normalised rows:
    (||U^T U||_F^2 - V) / (V (V - 1)). None for fewer than two rows.

    Example:
        >>> mean_squared_cosine(np.array([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))
        0.3333333333333333
    """
    rows = Rows.of(table)
    count = rows.nonzero.size
    if count < 2:
        return None
    if rows.wide:
        pairs = _sum_of_squares(_without_diagonal(rows.gram() / rows.lengths / rows.lengths[:, None]))
    else:
        unit_gram = _sum_of_grams((block for _, block in rows.unit_blocks()), rows.hidden_size)
        pairs = max(0.0, _sum_of_squares(unit_gram) - count)
    return min(1.0, pairs / (count * (count - 1)))


def welch_bound(rows: int, hidden_size: int) -> float | None:
    """The least mean squared cosine that V rows in D dimensions can have: max(0, V - D) / (D (V - 1)).

    Reached exactly by rows of one length that are a tight frame (Welch, "Lower Bounds on the Maximum Cross
    Correlation of Signals", 1974). None for fewer than two rows.

    Example:
        >>> round(welch_bound(30522, 384), 5)
        0.00257
    """
    if rows < 2 or hidden_size < 1:
        return None
    return max(0, rows - hidden_size) / (hidden_size * (rows - 1))


# The spectrum


def isotropy(table: Table | Rows) -> float | None:
    """I(E) = min_c Z(c) / max_c Z(c), Z(c) = sum_i exp(c . e_i), c over the unit eigenvectors of E^T E; in [0, 1].

    After Mu and Viswanath, "All-but-the-Top" (2018), who leave the sign of an eigenvector open: here c is each
    eigenvector and its negative, 2 D directions, so that the figure is defined. It is 1 when no direction is
    preferred. Z is summed as log-sum-exp. Unlike the other diagnostics it depends on the scale of E: a small table is
    isotropic by being small. Where eigenvalues coincide, so that eigenvectors are not unique, it depends on the basis
    that the solver picks.

    Example:
        >>> isotropy(np.zeros((3, 2)))
        1.0
        >>> round(isotropy(np.array([[1.0], [1.0]])), 4), round(math.exp(-2.0), 4)
        (0.1353, 0.1353)
    """
    rows = Rows.of(table)
    if not rows.count or not rows.hidden_size:
        return None
    log_z = _log_partition(rows)
    return math.exp(float(log_z.min()) - float(log_z.max()))


def effective_rank(table: Table | Rows) -> float | None:
    """exp(-sum_k p_k ln p_k), p_k = s_k / sum s, over the singular values s of E; in [1, min(V, D)].

    Roy and Vetterli, "The Effective Rank" (EUSIPCO 2007): the entropy is that of the singular values, not of their
    squares. None for a table of zeros.

    Example:
        >>> round(effective_rank(np.eye(5, 3)), 6)
        3.0
    """
    eigenvalues = Rows.of(table).spectrum()[0]
    shares = np.sqrt(eigenvalues[eigenvalues > 0])
    if not shares.size:
        return None
    shares /= shares.sum()
    return math.exp(-float(shares @ np.log(shares)))


def participation_ratio(table: Table | Rows) -> float | None:
    """P = (sum_k l_k)^2 / sum_k l_k^2 over the eigenvalues l of E^T E; in [1, min(V, D)].

    How many directions carry the squared norm, in the sense of the participation ratio of Bell and Dean (1970).
    Computed without an eigensolver, as (tr E^T E)^2 / ||E^T E||_F^2. Not centred: a common offset counts as a
    direction. None for a table of zeros.

    Example:
        >>> participation_ratio(np.eye(5, 3))
        3.0
    """
    rows = Rows.of(table)
    count, total = rows.count, rows.total
    trace = float(rows.squared_norms.sum())
    if trace == 0 or (count == 1 and total > 1):
        return None
    # ||E^T E||_F^2 is the sum of ||e_i||^4 over the rows and of (e_i . e_j)^2 over the pairs. Of a sample each is
    # multiplied to the table's number of rows or pairs: P of the sample alone is too small.
    fourth_powers = float(rows.squared_norms @ rows.squared_norms)
    if rows.wide:
        pairs = _sum_of_squares(_without_diagonal(rows.gram()))
    else:
        pairs = max(0.0, _sum_of_squares(rows.gram()) - fourth_powers)
    per_row = total / count
    per_pair = total * (total - 1) / (count * (count - 1)) if count > 1 else 0.0
    ratio = (trace * per_row) ** 2 / (fourth_powers * per_row + pairs * per_pair)
    return min(ratio, float(rows.hidden_size), float(total))


def frame_ratio(table: Table | Rows) -> float | None:
    """D sum_k l_k^2 / (sum_k l_k)^2 = D / P over the eigenvalues l of E^T E; in [1, D].

    The frame potential sum_ij (e_i . e_j)^2 over its minimum for rows of these norms' total (Benedetto and Fickus,
    "Finite Normalized Tight Frames", 2003): 1 for a tight frame. None for a table of zeros.

    Example:
        >>> frame_ratio(np.array([[1.0, 0.0], [1.0, 0.0]]))
        2.0
    """
    rows = Rows.of(table)
    ratio = participation_ratio(rows)
    return None if ratio is None else rows.hidden_size / ratio


def tight_frame_distance(table: Table | Rows) -> float | None:
    """||E^T E / c - I||_F / sqrt(D), c = tr(E^T E) / D, which is sqrt(D / P - 1); in [0, sqrt(D - 1)].

    0 exactly for a tight frame (Benedetto and Fickus, 2003), the one sense in which a table with V > D can be
    orthogonal. Resolves about 1e-7. None for a table of zeros.

    Example:
        >>> tight_frame_distance(np.vstack([np.eye(3), np.eye(3)]))
        0.0
    """
    ratio = frame_ratio(table)
    return None if ratio is None else math.sqrt(max(0.0, ratio - 1))


def identity_distance(table: Table | Rows) -> float | None:
    """min_a ||a E E^T - I||_F / sqrt(V), which is sqrt(1 - P / V); in [`identity_bound`, 1].

    The minimum is at a = tr(G) / ||G||_F^2 with G = E^T E (D, D), whose trace and norm are those of E E^T: no V x V
    matrix is needed. 1 for a table of zeros, None without rows.

    Example:
        >>> identity_distance(2 * np.eye(4))
        0.0
    """
    rows = Rows.of(table)
    if not rows.count:
        return None
    return math.sqrt(max(0.0, 1 - (participation_ratio(rows) or 0.0) / rows.total))


def identity_bound(rows: int, hidden_size: int) -> float | None:
    """The least `identity_distance` that V rows in D dimensions can have: sqrt(max(0, V - D) / V).

    E E^T has rank at most D, so V - D of its eigenvalues are 0 where the identity has 1. Reached by a tight frame.
    None without rows.

    Example:
        >>> round(identity_bound(30522, 384), 4)
        0.9937
    """
    if rows < 1 or hidden_size < 1:
        return None
    return math.sqrt(max(0, rows - hidden_size) / rows)


# Every row against the others


def self_decoding_failures(table: Table | Rows, queries: npt.ArrayLike | None = None) -> Indices:
    """The rows i with argmax_j e_i . e_j != i, ascending: tokens whose own embedding decodes to another token.

    `queries` are the rows asked about (indices into `table`; all of them when None); each is held against every row
    of the table. A tie counts as decoding to itself, so an exact duplicate is no failure: i fails when some j has
    e_i . (e_j - e_i) > 0. The best j is found in float32 and that inequality is decided in float64. Only rows longer
    than e_i are tried, since e_i . e_j <= ||e_i|| ||e_j||. Rows of zeros or with a NaN or an infinity are not asked.

    Example:
        >>> self_decoding_failures(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        array([0])
    """
    rows = Rows.of(table)
    order = np.argsort(-rows.norms, kind="stable")
    ranked = rows.array[order].astype(np.float32, copy=False)
    rank = np.empty(rows.count, dtype=np.int64)
    rank[order] = np.arange(rows.count)
    failed = []
    for asked in _score_blocks(np.unique(rank[rows.with_direction(queries)]), rows):
        longer = ranked[: int(asked[-1]) + 1]
        own = rows.array[order[asked]].astype(np.float64)
        unit = (own / rows.norms[order[asked], None]).astype(np.float32)
        best = (unit @ longer.T).argmax(axis=1)
        gain = np.einsum("ij,ij->i", own, rows.array[order[best]].astype(np.float64) - own)
        failed.append(order[asked[gain > 0]])
    return rows.given(np.sort(np.concatenate([np.empty(0, dtype=np.int64), *failed])))


def self_decoding_rate(table: Table | Rows, queries: npt.ArrayLike | None = None) -> float | None:
    """The share of the rows i with argmax_j e_i . e_j = i, in [0, 1].

    Ties, `queries` and the rows that are not asked as in `self_decoding_failures`. O(V^2 D) for a whole table, in
    blocks. None when no row is asked.

    Example:
        >>> self_decoding_rate(np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
        0.75
    """
    rows = Rows.of(table)
    asked = np.unique(rows.with_direction(queries)).size
    return 1 - self_decoding_failures(rows, queries).size / asked if asked else None


def nearest_rows(table: Table | Rows, queries: npt.ArrayLike | None = None) -> tuple[Indices, Floats]:
    """For each query row i: the row j != i with the largest cos(e_i, e_j), and that cosine, in [-1, 1].

    `queries` are indices into `table`, all rows when None; say `self_decoding_failures(table)`. Returns two arrays of
    their length; -1 and NaN where a cosine is not defined (a row of zeros, one with a NaN or an infinity, or no other
    row). Float32: cosines closer than about 1e-6 are not told apart.

    Example:
        >>> neighbours, cosines = nearest_rows(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), [0, 1])
        >>> neighbours, np.round(cosines, 6)
        (array([2, 2]), array([0.6, 0.8]))
    """
    rows = Rows.of(table)
    asked = rows.positions(queries)
    neighbours = np.full(asked.size, -1, dtype=np.int64)
    cosines = np.full(asked.size, np.nan)
    if rows.nonzero.size < 2:
        return neighbours, cosines
    unit = np.empty(rows.array.shape, dtype=np.float32)
    for place, block in rows.unit_blocks():
        unit[place] = block
    zeros = np.flatnonzero(rows.norms == 0)
    for places in _score_blocks(np.flatnonzero(rows.have_direction(asked)), rows):
        own, line = asked[places], np.arange(places.size)
        scores = unit[own] @ unit.T
        scores[line, own] = -np.inf
        scores[:, zeros] = -np.inf
        best = scores.argmax(axis=1)
        neighbours[places] = rows.given(best)
        cosines[places] = np.clip(scores[line, best], -1.0, 1.0)
        del scores  # before the next block's are there
    return neighbours, cosines


def median_nearest_cosine(table: Table | Rows, queries: npt.ArrayLike | None = None) -> float | None:
    """The median over the rows i of max_{j != i} cos(e_i, e_j), in [-1, 1].

    How close a typical token's nearest neighbour is. `queries` as in `nearest_rows`; rows without a cosine are left
    out. None when none remains.

    Example:
        >>> round(median_nearest_cosine(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]])), 6)
        0.8
    """
    cosines = nearest_rows(table, queries)[1]
    cosines = cosines[~np.isnan(cosines)]
    return float(np.median(cosines)) if cosines.size else None


# All of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryReport:
    """Every diagnostic of one table, and what it was computed from.

    rows, hidden_size: V and D of the table.
    sampled_rows: how many rows were looked at; None when it was all of them and the report is exact.
    left_out_rows, zero_rows: of the rows looked at, those with a NaN or an infinity, and those of zeros.
    queried_rows: a uniform sample of the rows looked at, each held against all of those, for `self_decoding_rate`
        and `median_nearest_cosine`.

    In a report on a sample, `self_decoding_rate` is the rate among the sampled rows and `median_nearest_cosine` that
    within the sample: fewer rows compete, so the table's own rate is lower and its own cosine higher. Norms are the
    sample's. Means over pairs, and what follows from the participation ratio, are estimates for the V rows of the
    table. `isotropy` and `effective_rank` are the sample's, and None below 2 rows for each dimension: at 2 a
    Gaussian table already reads 7% low in effective rank.

    Example:
        >>> report = describe(np.eye(4))
        >>> report.sampled_rows, report.participation_ratio, report.as_dict()["row_norms"]["p50"]
        (None, 4.0, 1.0)
    """

    rows: int
    hidden_size: int
    sampled_rows: int | None
    left_out_rows: int
    zero_rows: int
    row_norms: Quantiles | None
    mean_cosine: float | None
    mean_squared_cosine: float | None
    welch_bound: float | None
    isotropy: float | None
    effective_rank: float | None
    participation_ratio: float | None
    frame_ratio: float | None
    tight_frame_distance: float | None
    identity_distance: float | None
    identity_bound: float | None
    queried_rows: int
    self_decoding_rate: float | None
    median_nearest_cosine: float | None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dicts, numbers and None, in field order, ready for JSON."""
        return asdict(self)


def sample_rows(rows: int, hidden_size: int, budget_bytes: int = 32 << 20, seed: int = 0) -> Indices | None:
    """Which rows of a (rows, hidden_size) table to read, so that they fit `budget_bytes` as float32.

    A uniform sample without replacement, ascending, the same for the same seed. None when the whole table fits. At
    least two rows, so that there is a pair.

    Example:
        >>> sample_rows(1000, 64) is None
        True
        >>> sample_rows(128256, 8192).size
        1024
    """
    for name, value in (("rows", rows), ("hidden_size", hidden_size), ("budget_bytes", budget_bytes)):
        if value < 0:
            raise UsageError(f"{name}: expected a count, got {value}", help=f"pass {name} of 0 or more")
    fitting = max(2, budget_bytes // max(1, 4 * hidden_size))
    if rows <= fitting:
        return None
    chosen = np.random.default_rng(seed).choice(rows, size=fitting, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)


def describe(table: Table, *, rows: int | None = None, seed: int = 0) -> GeometryReport:
    """Every diagnostic of a table, or of a sample of its rows.

    `table` (V, D) is the whole table, or the rows that `sample_rows` chose from a table of `rows` rows (default: V,
    the whole). `seed` draws the rows whose scores against all others are computed: as many as 6e9 multiplications
    allow, and at least 256. See `GeometryReport` for what a figure of a sample means. Raises `UsageError` when `rows`
    is less than V.

    Example:
        >>> table = np.random.default_rng(0).normal(size=(2000, 16))
        >>> chosen = sample_rows(2000, 16, budget_bytes=64000)
        >>> report = describe(table[chosen], rows=2000)
        >>> report.rows, report.sampled_rows, round(report.participation_ratio)
        (2000, 1000, 16)
    """
    held = Rows(table, total=rows)
    sampled = held.stored < held.stored_total
    shows_spectrum = not sampled or held.count >= SPECTRUM_ROWS * held.hidden_size
    queries = _queries(held, seed)
    return GeometryReport(
        rows=held.stored_total,
        hidden_size=held.hidden_size,
        sampled_rows=held.stored if sampled else None,
        left_out_rows=held.stored - held.count,
        zero_rows=held.count - held.nonzero.size,
        row_norms=row_norm_quantiles(held),
        mean_cosine=mean_cosine(held),
        mean_squared_cosine=mean_squared_cosine(held),
        welch_bound=welch_bound(held.in_table(held.nonzero.size), held.hidden_size),
        isotropy=isotropy(held) if shows_spectrum else None,
        effective_rank=effective_rank(held) if shows_spectrum else None,
        participation_ratio=participation_ratio(held),
        frame_ratio=frame_ratio(held),
        tight_frame_distance=tight_frame_distance(held),
        identity_distance=identity_distance(held),
        identity_bound=identity_bound(held.total, held.hidden_size),
        queried_rows=queries.size,
        self_decoding_rate=self_decoding_rate(held, queries),
        median_nearest_cosine=median_nearest_cosine(held, queries),
    )


# What they are made of


def _floats(table: Table) -> Table:
    array = np.asarray(table)
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


def _indices(queries: npt.ArrayLike | None, stored: int) -> Indices:
    if queries is None:
        return np.arange(stored)
    asked = np.asarray(queries)
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


def _largest_entry(array: Table) -> float:
    """The largest magnitude; NaN when there is a NaN."""
    return float(np.maximum(array.max(), -array.min())) if array.size else 0.0


def _usable_rows(array: Table) -> Indices:
    finite = np.flatnonzero(np.isfinite(array).all(axis=1))
    largest = np.abs(array[finite]).max(axis=1, initial=0.0).astype(np.float64)
    usable: Indices = finite[largest <= LARGEST_ENTRY]
    return usable


def _sum_of_grams(parts: Iterator[Table], side: int) -> Table:
    dtype: type[np.floating[Any]] = np.float64 if side <= FLOAT64_GRAM else np.float32
    gram: Table = np.zeros((side, side), dtype=dtype)
    for part in parts:
        block: Table = part.astype(dtype, copy=False)
        gram += block.T @ block
    return gram


def _without_diagonal(matrix: Table) -> Table:
    pairs = matrix.copy()
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _sum_of_squares(matrix: Table) -> float:
    return float(np.square(matrix, dtype=np.float64).sum())


def _log_partition(rows: Rows) -> Floats:
    """ln Z(c) for every eigenvector c of the Gram matrix, and for every -c."""
    eigenvalues, vectors = rows.spectrum()
    log_z = np.full((2, eigenvalues.size), -np.inf)
    for part in _coordinates(rows, eigenvalues, vectors):
        for signed, sums in zip((part, -part), log_z, strict=True):
            highest = signed.max(axis=0)
            z = np.exp(signed - highest).sum(axis=0, dtype=np.float64)
            np.logaddexp(sums, highest + np.log(z), out=sums)
    # With fewer rows than dimensions the other eigenvectors are orthogonal to every row: Z = V.
    return np.append(log_z, [math.log(rows.count)] if rows.wide else [])


def _coordinates(rows: Rows, eigenvalues: Floats, vectors: Table) -> Iterator[Table]:
    """c . e_i for every eigenvector c, in blocks of rows."""
    if rows.wide:  # of E E^T, whose eigenvectors times the singular values are the coordinates themselves
        yield np.ldexp(vectors * np.sqrt(eigenvalues), rows.exponent)
        return
    narrow = vectors.astype(np.float32)
    for _, block in rows.blocks():
        part = block.astype(np.float32) @ narrow
        yield np.ldexp(part.astype(np.float64), rows.exponent) if rows.exponent else part


def _score_blocks(queries: Indices, rows: Rows) -> Iterator[Indices]:
    """Some of the queries at a time: few enough for their scores, and for float64 copies of the rows themselves."""
    step = max(1, SCORE_ENTRIES // max(1, rows.count, 8 * rows.hidden_size))
    for start in range(0, queries.size, step):
        yield queries[start : start + step]


def _queries(rows: Rows, seed: int) -> Indices:
    affordable = max(LEAST_QUERIES, QUERY_PRODUCTS // max(1, rows.count * rows.hidden_size))
    directed = rows.given(rows.nonzero)
    if directed.size <= affordable:
        return directed
    return np.sort(np.random.default_rng(seed).choice(directed, size=affordable, replace=False, shuffle=False))
