"""The numbers that a page plots, against the same computed by numpy from the whole table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bowline.geometry.table_source import as_source
from bowline.page.panels.eigenvalues import spectrum_panel
from bowline.page.table_view import TableView, view_table
from tests.checkpoints import table

Floats = npt.NDArray[np.float64]


def view(values: npt.NDArray[np.floating], first: npt.ArrayLike = ()) -> TableView:
    return view_table(as_source(values), label="a table", tensor="weight", first=first)


def leaning(rows: int, columns: int) -> npt.NDArray[np.float32]:
    """A table with a common offset and directions of different size, as trained tables have them."""
    return (table(rows, columns) * np.linspace(2, 0.1, columns) + 0.3).astype(np.float32)


@pytest.mark.parametrize("shape", [(400, 32), (32, 32), (20, 48), (7, 1), (3, 200)])
def test_norms_are_those_of_numpy(shape: tuple[int, int]) -> None:
    values = leaning(*shape)
    np.testing.assert_allclose(view(values).norms, np.linalg.norm(values.astype(np.float64), axis=1), rtol=1e-12)


@pytest.mark.parametrize("shape", [(400, 32), (64, 32), (32, 32), (20, 48)])
def test_the_spectrum_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    values = leaning(*shape)
    found = view(values).eigenvalues
    assert found is not None and (np.diff(found) <= 0).all()
    squares = np.square(np.linalg.svd(values.astype(np.float64), compute_uv=False))
    np.testing.assert_allclose(found[: squares.size], squares / squares.sum() * found.size, rtol=1e-4, atol=1e-6)
    assert not found[squares.size :].any()


@pytest.mark.parametrize("shape", [(400, 32), (20, 48), (2, 5)])
def test_the_block_is_that_of_the_products(shape: tuple[int, int]) -> None:
    values = leaning(*shape)
    found = view(values)
    rows = values.astype(np.float64)
    products = (rows @ rows.T) / np.square(rows).sum(axis=1).mean()
    expected = products[np.ix_(found.block_rows, found.block_rows)]
    np.testing.assert_allclose(found.block, expected, rtol=1e-10, atol=1e-12)
    assert found.block_rows[0] == 0 and found.block_rows[-1] == shape[0] - 1


@pytest.mark.parametrize("shape", [(400, 32), (1500, 8), (20, 48), (40, 2), (9, 1)])
def test_the_map_is_that_of_the_principal_components(shape: tuple[int, int]) -> None:
    values = leaning(*shape)
    if shape[1] == 1:
        values[::2] *= -1
    found = view(values)
    rows = values[found.mapped].astype(np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    left, sizes, _ = np.linalg.svd(units - units.mean(axis=0), full_matrices=False)
    kept = min(2, shape[1])
    expected = left[:, :kept] * sizes[:kept]
    signs = np.sign((expected * found.places[:, :kept]).sum(axis=0))
    np.testing.assert_allclose(found.places[:, :kept], expected * signs, atol=1e-9)
    assert found.mapped_share == pytest.approx(np.square(sizes[:kept]).sum() / np.square(sizes).sum(), rel=1e-9)
    assert not found.places[:, kept:].any()


def test_neighbours_of_rows_that_repeat_are_their_copies() -> None:
    values = np.vstack([leaning(50, 16), leaning(50, 16) * np.float32(3)])
    found = view(values)
    assert found.looked_up.tolist() == list(range(100))
    np.testing.assert_array_equal(found.neighbours[:, 0], (np.arange(100) + 50) % 100)
    np.testing.assert_allclose(found.cosines[:, 0], 1.0, atol=1e-6)


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 12), st.integers(1, 5)),
        elements=st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-30, 3e38, np.inf, np.nan]),
    ),
    st.lists(st.integers(-3, 20), max_size=5),
)
@settings(deadline=None)
def test_rows_without_a_direction_are_in_no_plot(values: npt.NDArray[np.float32], first: list[int]) -> None:
    found = view(values, first)
    finite = np.isfinite(values).all(axis=1)
    np.testing.assert_array_equal(np.isnan(found.norms), ~finite)
    usable = np.flatnonzero(finite & values.any(axis=1))
    for rows in (found.looked_up, found.block_rows, found.mapped):
        assert np.isin(rows, usable).all()
    assert np.isfinite(found.block).all() and np.isfinite(found.places).all() and 0 <= found.mapped_share <= 1 + 1e-9
    assert np.isin(found.neighbours, [-1, *usable]).all()
    assert ((found.neighbours >= 0) == np.isfinite(found.cosines)).all()
    assert (found.neighbours != found.looked_up[:, None]).all()


def test_a_sample_that_does_not_show_the_spectrum_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bowline.page.table_view.MOST_LOOKED_UP", 64)
    found = view(table(7000, 3000))
    assert found.eigenvalues is None and found.sampled_rows is not None
    said = f"Left out: the {found.sampled_rows:,} rows of 3,000 that were read do not show it."
    assert said in spectrum_panel(found)
