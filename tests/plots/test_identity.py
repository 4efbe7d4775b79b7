"""Is E E^T = I? The numbers are those of the geometry, and the figure shows them where they can be read."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from bowline import geometry
from bowline.errors import UsageError
from bowline.plots import figure_style
from bowline.plots import identity_figure as plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = npt.NDArray[np.float64]
CLOSE = pytest.approx


@pytest.fixture
def drawing() -> Any:
    return pytest.importorskip("matplotlib", reason="pip install 'bowline-ties[plot]'")


def trained(rows: int = 900, hidden_size: int = 24) -> Matrix:
    """A table with strong and weak directions, a common offset, and some rows that were never trained."""
    table = np.random.default_rng(0).normal(size=(rows, hidden_size)) * np.geomspace(3, 0.2, hidden_size) + 0.1
    table[: rows // 20] = 0.05 * table[: rows // 20] + 0.3
    return table


SHAPES = [(200, 24), (20, 60), (50, 50), (40, 2), (30, 1), (2, 5)]

# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_figures_are_those_of_the_geometry(shape: tuple[int, int]) -> None:
    table = trained(*shape)
    answer = plot.identity_answer(table)
    assert (answer.rows, answer.hidden_size, answer.sampled_rows, answer.seen_rows) == (*shape, None, shape[0])
    for name in ("identity_distance", "tight_frame_distance", "mean_cosine", "mean_squared_cosine"):
        assert getattr(answer, name) == getattr(geometry, name)(table)
    assert answer.identity_bound == geometry.identity_bound(*shape)
    assert answer.welch_bound == geometry.welch_bound(*shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_shown_is_the_spectrum_the_pairs_and_the_lengths(shape: tuple[int, int]) -> None:
    table = trained(*shape)
    answer = plot.identity_answer(table)
    squares = np.linalg.svd(table, compute_uv=False) ** 2
    assert answer.eigenvalues == CLOSE(squares / squares.mean(), abs=1e-9)
    norms = np.linalg.norm(table, axis=1)
    assert answer.norms == CLOSE(norms / math.sqrt(np.mean(norms**2)))
    unit = table / norms[:, None]
    pairs = [unit[i] @ unit[j] for i, j in combinations(range(shape[0]), 2)]
    assert np.allclose(np.sort(answer.cosines), np.sort(pairs), atol=1e-9)


@pytest.mark.parametrize("shape", [(2000, 100), (100, 2000), (300, 300)])
def test_a_gaussian_table_is_where_the_gaussian_is_said_to_be(shape: tuple[int, int]) -> None:
    answer = plot.identity_answer(np.random.default_rng(0).normal(size=shape))
    assert answer.identity_distance == CLOSE(answer.gaussian_identity_distance, rel=5e-3)
    assert answer.tight_frame_distance == CLOSE(answer.gaussian_tight_frame_distance, rel=2e-2)


def test_minilm_is_as_far_from_the_identity_as_the_geometry_says(minilm: Path) -> None:
    table = load_file(minilm / "model.safetensors")["embeddings.word_embeddings.weight"]
    answer = plot.identity_answer(table)
    assert answer.sentence() == (
        "no: its rank is at most 384 of 30522; distance 0.9968 from a multiple of I, at least 0.9937 for this shape"
    )
    assert answer.gaussian_identity_distance == CLOSE(0.9938, abs=1e-4)
    assert (answer.tight_frame_distance, answer.gaussian_tight_frame_distance) == CLOSE((0.969, 0.112), abs=1e-3)


def test_the_answer_in_words() -> None:
    assert plot.identity_answer(2 * np.eye(4)).sentence() == "distance 0.0000 from a multiple of I, 0 would be equal"
    assert plot.identity_answer(trained()).sentence().startswith("no: its rank is at most 24 of 900; distance 0.9")


def test_a_sample_is_drawn_of_a_large_table_and_stands_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    table = trained(6000, 20)
    whole = plot.identity_answer(table)
    monkeypatch.setattr(plot, "WHOLE_ENTRIES", 30_000)
    sampled = plot.identity_answer(table)
    assert (sampled.rows, sampled.sampled_rows, sampled.seen_rows) == (6000, 1500, 1500)
    assert sampled.identity_bound == whole.identity_bound
    assert 1 - sampled.identity_distance == CLOSE(1 - whole.identity_distance, rel=0.1)
    assert sampled.eigenvalues == CLOSE(whole.eigenvalues, rel=0.25)
    tensor = plot.identity_answer(torch.from_numpy(table))
    assert tensor.identity_distance == sampled.identity_distance
    given = plot.identity_answer(table[:1500], rows=6000)
    assert (given.rows, given.sampled_rows) == (6000, 1500)


def test_pairs_are_drawn_by_the_seed_among_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "PAIRED_ROWS", 40)
    first, again, other = (plot.identity_answer(trained(), seed=seed).cosines for seed in (0, 0, 1))
    assert first.size == 40 * 39 / 2
    assert first.tolist() == again.tolist() != other.tolist()


def test_rows_that_cannot_be_used_are_left_out() -> None:
    table = trained()
    bad = np.vstack([np.full((2, 24), np.nan), np.zeros((1, 24)), table])
    answer = plot.identity_answer(bad)
    assert (answer.rows, answer.seen_rows) == (901, 901)
    assert answer.norms.min() == 0
    assert np.isfinite(answer.cosines).all()


@pytest.mark.parametrize("table", [np.zeros((4, 3)), np.ones((1, 3)), np.zeros((0, 3)), np.full((3, 3), np.nan)])
def test_a_table_without_two_rows_is_refused(table: Matrix) -> None:
    with pytest.raises(UsageError, match="table: expected at least two rows that are finite and not zero"):
        plot.identity_answer(table)


def test_what_is_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "WHOLE_ENTRIES", 4)
    for table in (np.zeros(3), torch.eye(3).to_sparse(), torch.ones(3, 3, device="meta")):
        with pytest.raises(UsageError, match="table: expected"):
            plot.identity_answer(table)


# --- matplotlib, or not ---------------------------------------------------------------------------------------------


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_the_numbers_need_no_matplotlib() -> None:
    answer = "from bowline.plots.identity_figure import identity_answer\nidentity_answer(numpy.eye(3))"
    assert run(f"import sys, numpy\n{answer}\nprint({{'matplotlib', 'torch'}} & set(sys.modules))") == "set()"


def test_where_matplotlib_is_missing_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="needs matplotlib, which is not installed") as caught:
        plot.identity_figure(np.eye(3))
    assert caught.value.help == "pip install '.[plot]' in a checkout, or 'bowline-ties[plot]' once it is on the index"


def test_another_missing_module_is_not_called_matplotlib(monkeypatch: pytest.MonkeyPatch, drawing: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ModuleNotFoundError, match="style"), figure_style.plain_style():
        pass


# --- the figure -----------------------------------------------------------------------------------------------------


def lines(axes: Axes, colour: str) -> list[Matrix]:
    return [np.asarray(line.get_xydata()) for line in axes.get_lines() if line.get_color() == colour]


def words(figure: Figure) -> list[Any]:
    """What is written on it, the numbers of the axes aside."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    numbers = {id(text) for axis in axes for text in axis.findobj(Text) if text is not axis.label}
    texts: list[Any] = figure.findobj(Text)
    return [text for text in texts if text.get_text().strip() and id(text) not in numbers]


def test_each_panel_draws_its_part_of_the_answer(drawing: Any) -> None:
    answer = plot.identity_answer(trained())
    figure = plot.identity_figure(answer)
    spectrum, cosines, norms = figure.axes
    assert lines(spectrum, figure_style.MEASURED)[0][:, 1] == CLOSE(answer.eigenvalues)
    assert lines(spectrum, figure_style.REFERENCE)[0][:, 1] == CLOSE(geometry.gaussian_eigenvalues(900, 24))
    assert lines(spectrum, figure_style.INK)[0][:, 1].tolist() == [1, 1]
    assert lines(cosines, figure_style.INK)[0][:, 0].tolist() == [0, 0]
    assert lines(norms, figure_style.INK)[0][:, 0].tolist() == [1, 1]
    for axes, values in ((cosines, answer.cosines), (norms, answer.norms)):
        stairs: Any = axes.patches[0]
        density, edges, _ = stairs.get_data()
        assert (density * np.diff(edges)).sum() == CLOSE(1)
        assert edges[0] <= values.min() <= values.max() <= edges[-1]
        low, high = axes.get_ylim()
        assert low <= density[density > 0].min() and density.max() <= high


def test_the_title_answers_with_the_number(drawing: Any) -> None:
    answer = plot.identity_answer(trained())
    told = " ".join(text.get_text() for text in words(plot.identity_figure(answer, name="the table")))
    assert "Is E Eᵀ = I?  No, its rank is at most 24 of 900" in told
    assert f"distance {answer.identity_distance:.4f}" in told
    assert f"at least {answer.identity_bound:.4f}" in told
    assert f"{answer.gaussian_identity_distance:.4f} for a Gaussian table" in told
    assert "the table" in told
    square = " ".join(text.get_text() for text in words(plot.identity_figure(np.eye(4))))
    assert "Is E Eᵀ = I?  It has distance 0.0000" in square


@pytest.mark.parametrize("shape", [(900, 24), (256_000, 16_384), (3, 3)])
def test_no_words_overlap_or_leave_the_page(drawing: Any, shape: tuple[int, int]) -> None:
    from dataclasses import replace

    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = plot.identity_answer(trained(min(shape[0], 900), min(shape[1], 24)))
    if shape[0] > 900:  # the longest words there are, over the same curves
        spectrum = np.geomspace(9, 0.05, 900)
        drawn = replace(drawn, rows=shape[0], hidden_size=shape[1], sampled_rows=2441, eigenvalues=spectrum)
    with figure_style.plain_style():
        figure = plot.identity_figure(
            drawn, name="organisation/a-model-with-a-name-as-long-as-the-hub-allows-and-longer"
        )
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in words(figure)]
    assert len(boxes) > 12
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (first, one), (second, other) in combinations(boxes, 2):
        assert not one.overlaps(other), f"{first!r} and {second!r}"
    for panel in figure.axes:
        numbers = [tick.label1.get_window_extent() for tick in panel.yaxis.get_major_ticks() if tick.label1.get_text()]
        seen = [box for box in numbers if 0 <= box.y0 <= figure.bbox.y1]
        label = panel.yaxis.label.get_window_extent()
        assert seen and not any(label.overlaps(box) for box in seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_table_can_be_drawn(drawing: Any, shape: tuple[int, int], tmp_path: Path) -> None:
    figure_style.save(plot.identity_figure(trained(*shape), name="$x_{1$"), tmp_path / "figure.png")


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_the_same_table_is_the_same_file(drawing: Any, tmp_path: Path, ending: str) -> None:
    files = [figure_style.save(plot.identity_figure(trained()), tmp_path / f"{i}.{ending}") for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size < 400_000


def test_the_svg_has_no_date_and_no_version(drawing: Any, tmp_path: Path) -> None:
    text = figure_style.save(plot.identity_figure(trained()), tmp_path / "figure.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "dc:date" not in text
    assert drawing.__version__ not in text


def test_the_readers_own_settings_are_neither_used_nor_changed(drawing: Any, tmp_path: Path) -> None:
    plain = figure_style.save(plot.identity_figure(trained()), tmp_path / "plain.svg").read_bytes()
    with drawing.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": None}):
        before = dict(drawing.rcParams)
        own = figure_style.save(plot.identity_figure(trained()), tmp_path / "own.svg").read_bytes()
        assert dict(drawing.rcParams) == before
    assert own == plain


@pytest.fixture
def figure(drawing: Any) -> Iterator[Figure]:
    with figure_style.plain_style():
        from matplotlib.figure import Figure

        yield Figure()


@pytest.mark.parametrize("name", ["figure", "figure.jpeg", "figure.svg.txt"])
def test_a_format_that_is_not_written_is_refused(figure: Figure, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"expected a file name that ends in \.svg, \.png, \.pdf"):
        figure_style.save(figure, tmp_path / name)


def test_a_place_that_is_not_there_is_an_error_and_no_traceback(figure: Figure, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the directory .* does not exist"):
        figure_style.save(figure, tmp_path / "nowhere" / "figure.svg")
