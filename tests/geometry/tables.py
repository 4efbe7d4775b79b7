"""Tables for the tests, drawn or constructed, and the figures that do not depend on scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from bowline import geometry

Matrix = npt.NDArray[np.float64]
CLOSE = pytest.approx
ENTRIES = st.floats(-4, 4, width=32).map(lambda x: round(x, 2))
SCALE_FREE = (
    geometry.mean_cosine,
    geometry.mean_squared_cosine,
    geometry.effective_rank,
    geometry.isoscore,
    geometry.participation_ratio,
    geometry.frame_ratio,
    geometry.tight_frame_distance,
    geometry.identity_distance,
    geometry.self_decoding_rate,
    geometry.median_nearest_cosine,
)


def tables(min_side: int = 1) -> st.SearchStrategy[Matrix]:
    shapes = array_shapes(min_dims=2, max_dims=2, min_side=min_side, max_side=9)
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=ENTRIES))


def gaussian(rows: int, hidden_size: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).normal(size=(rows, hidden_size))


def pair_cosines(table: Matrix) -> Matrix:
    """The (V, V) cosines of the nonzero rows, NaN on the diagonal."""
    kept = table[np.linalg.norm(table, axis=1) > 0]
    unit = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    cosines: Matrix = unit @ unit.T
    np.fill_diagonal(cosines, np.nan)
    return cosines


def orthonormal(rows: int, hidden_size: int) -> Matrix:
    """Orthonormal rows, or orthonormal columns: a tight frame."""
    wide = np.linalg.qr(gaussian(max(rows, hidden_size), min(rows, hidden_size)))[0]
    return np.asarray(wide if rows >= hidden_size else wide.T)


def with_bad_rows(table: Matrix) -> Matrix:
    """Four rows that cannot be used, then the table."""
    bad = np.zeros((len(table) + 4, table.shape[1]))
    bad[:4, 0] = (np.nan, np.inf, -np.inf, 1e200)
    bad[4:] = table
    return bad
