"""`bowline compare --html`: every pair of rows and every row without a partner is in the page's list, and fits it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bowline.auditing.checkpoint_comparison import compare_open
from bowline.checkpoint import open_checkpoint
from bowline.page import comparison_page
from tests.checkpoints import GPT2, HEAD, ROWS, WTE, table, tied_gpt2, write
from tests.page.parsed import Node, Search, parsed

NAMES = [f"token{number}" for number in range(ROWS)]


def text_of(before: Path, after: Path) -> str:
    with open_checkpoint(before) as first, open_checkpoint(after) as second:
        return comparison_page(compare_open(first, second), first, second, on=date(2026, 1, 2))


def page_of(before: Path, after: Path) -> Node:
    return parsed(text_of(before, after))


def heading(page: Node) -> str:
    return page.one("h1").text


def named(directory: Path, rows: npt.NDArray[np.float32], ids: dict[str, int]) -> Path:
    tokenizer = {"model": {"type": "BPE", "vocab": ids}}
    return write(directory, {WTE: rows}, {**GPT2, "vocab_size": len(rows)}, files={"tokenizer": tokenizer})


def changes(search: Search, number: int = 0) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = search.values(f"changes{number}", search.meta["changes"][number])
    return found


def names(search: Search) -> list[str]:
    return search._unpacked("names").decode().split("\n")


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_rows_that_were_not_compared_are_not_said_to_be_unmoved(tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: table(ROWS, 9)}, GPT2)
    assert heading(page_of(before, after)) == "No row was compared"


def test_one_row_that_is_new_is_singular(tmp_path: Path) -> None:
    after = write(tmp_path / "b", {WTE: np.vstack([table(), table(1, seed=9)])}, {**GPT2, "vocab_size": ROWS + 1})
    page = page_of(tied_gpt2(tmp_path / "a"), after)
    assert heading(page) == "No row moved and 1 is new"
    assert "1 row is only in the checkpoint after (64)." in page.one("main").text


def test_equal_rows_with_other_tokens_are_said(tmp_path: Path) -> None:
    before = named(tmp_path / "a", table(), {name: row for row, name in enumerate(NAMES)})
    after = named(tmp_path / "b", table(), {f"{name}{'x' * (row < 5)}": row for row, name in enumerate(NAMES)})
    page = page_of(before, after)
    assert heading(page) == "All rows of both are equal"
    assert "5 of them have another token after (0-4)." in page.one("main").text


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_pairs_by_token_have_the_ids_of_both_sides(tmp_path: Path) -> None:
    kept = [63, 9, 3]
    before = named(tmp_path / "a", table(), {name: row for row, name in enumerate(NAMES)})
    values = table()[kept]
    values[1] *= 1.5
    after = named(tmp_path / "b", values, {NAMES[row]: place for place, row in enumerate(kept)})
    search = Search.of(page_of(before, after))
    assert names(search)[:4] == ["3 (after: 2)", "9 (after: 1)", "63 (after: 0)", "0 before"]
    assert search.texts[:4] == ["token3", "token9", "token63", "token0"] and len(search.texts) == ROWS
    np.testing.assert_allclose(changes(search)[:3], [0, 0.5, 0], rtol=2e-3)
    assert np.isnan(changes(search)[3:]).all()
    norms = [np.linalg.norm(rows.astype(np.float64), axis=1) for rows in (table(), values)]
    found = [search.values(f"table{number}-norms", search.meta["tables"][number]) for number in range(2)]
    np.testing.assert_allclose(found[0][:4], norms[0][[3, 9, 63, 0]], rtol=2e-3)
    np.testing.assert_allclose(found[1][:3], norms[1][[2, 1, 0]], rtol=2e-3)
    assert np.isnan(found[1][3:]).all()


@pytest.mark.parametrize("side", ["before", "after"])
def test_two_tokens_of_one_id_are_two_pairs(side: str, tmp_path: Path) -> None:
    plain = {name: row for row, name in enumerate(NAMES)}
    double = {**plain, "token5": 6}
    first, second = (double, plain) if side == "before" else (plain, double)
    before, after = named(tmp_path / "a", table(), first), named(tmp_path / "b", table(), second)
    search = Search.of(page_of(before, after))
    other = "6 (after: 5)" if side == "before" else "5 (after: 6)"
    assert len(names(search)) == ROWS + 1 and f"5 {side}" not in names(search)[:ROWS] and "6" in names(search)
    moved = dict(zip(names(search), changes(search), strict=True))
    rows = table().astype(np.float64)
    one, two = (6, 5) if side == "before" else (5, 6)
    expected = np.linalg.norm(rows[two] - rows[one]) / np.linalg.norm(rows[one])
    assert moved[other] == pytest.approx(expected, rel=2e-3) and moved["6"] == 0


def test_a_longer_head_has_its_own_rows(tmp_path: Path) -> None:
    untied = {**GPT2, "tie_word_embeddings": False}
    before = write(tmp_path / "a", {WTE: table(), HEAD: table(seed=1)}, untied)
    after = write(tmp_path / "b", {WTE: table(), HEAD: 2 * table(ROWS + 8, seed=1)}, untied)
    search = Search.of(page_of(before, after))
    assert search.meta["rows"] == ROWS + 8 and [one["label"] for one in search.meta["changes"]] == [
        "embedding moved by",
        "head moved by",
    ]
    assert not changes(search)[:ROWS].any() and np.isnan(changes(search)[ROWS:]).all()
    assert np.isnan(search.values("table1-norms", search.meta["tables"][1])[ROWS:]).all()
    assert not np.isnan(search.values("table3-norms", search.meta["tables"][3])).any()


def test_rows_from_zeros_and_rows_that_are_not_finite_have_words(tmp_path: Path) -> None:
    first, second = table(), table()
    first[1], second[2] = 0, np.nan
    page = page_of(write(tmp_path / "a", {WTE: first}, GPT2), write(tmp_path / "b", {WTE: second}, GPT2))
    figure = next(figure for figure in page.all("figure") if "How far rows moved" in figure.text)
    lines = [[cell.text for cell in row.all("td")] for row in figure.all("tbody")[0].all("tr")]
    norm = float(np.linalg.norm(table()[1].astype(np.float64)))
    assert sorted(lines) == [["1", f"{norm:.4g}", "was zero", "none"], ["2", "not finite", "not finite", "none"]]


# --- its size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["id", "token"])
def test_a_vocabulary_that_does_not_fit_is_sampled(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bowline.page.row_list.MOST_LISTED", 30)
    values = table()
    values[17] *= 2
    order = np.arange(ROWS) if by == "id" else np.arange(ROWS)[::-1]
    before = named(tmp_path / "a", table(), {name: row for row, name in enumerate(NAMES)})
    after = named(tmp_path / "b", values[order], {NAMES[row]: place for place, row in enumerate(order.tolist())})
    page = page_of(before, after)
    search = Search.of(page)
    assert f"The page lists {search.meta['rows']} of the {ROWS} rows." in page.one("p", class_="limits").text
    assert 25 < search.meta["rows"] <= 30 and len(search.texts) == search.meta["rows"]
    at = search.texts.index("token17")
    assert changes(search)[at] == pytest.approx(1.0, rel=2e-3) and np.count_nonzero(changes(search)) == 1
    if by == "id":
        assert np.cumsum(search.numbers("ids", 3))[at] == 17
    else:
        assert names(search)[at] == f"17 (after: {ROWS - 18})"
    moved = next(figure for figure in page.all("figure") if "How far rows moved" in figure.text)
    assert f"#row={at}" in [link.attributes["href"] for link in moved.all("a")]


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "untied"), [(262_144, False), (262_144, True), (32_000, True)])
@pytest.mark.parametrize("by", ["id", "token"])
def test_two_vocabularies_stay_below_3_mb(rows: int, untied: bool, by: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    words = [f"\u2581{word:x}" for word in random.integers(1 << 40, size=rows).tolist()]
    config = {**GPT2, "vocab_size": rows, "tie_word_embeddings": not untied}
    paths: list[Path] = []
    for name in ("a", "b"):
        order = random.permutation(rows) if by == "token" else np.arange(rows)
        noise = np.float32(0.1) * table(rows, 16, seed=len(paths) + 2)
        tensors = {WTE: (table(rows, 16) + noise)[order]}
        if untied:
            tensors[HEAD] = (table(rows, 16, seed=1) + noise)[order]
        ids = {words[row]: place for place, row in enumerate(order.tolist())}
        tokenizer = {"model": {"type": "BPE", "vocab": ids}}
        paths.append(write(tmp_path / name, tensors, config, files={"tokenizer": tokenizer}))
    assert len(text_of(*paths).encode()) < 3_000_000


def test_a_matrix_of_both_ends_is_one_table(tmp_path: Path) -> None:
    before = tied_gpt2(tmp_path / "a")
    after = write(tmp_path / "b", {WTE: table(), HEAD: table(seed=1)}, {**GPT2, "tie_word_embeddings": False})
    search = Search.of(page_of(before, after))
    labels = [found["label"] for found in search.meta["tables"]]
    assert labels == ["embedding and head before", "embedding after", "head after"]


def test_a_row_that_moved_in_one_end_has_its_neighbours_in_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bowline.page.table_view.MOST_LOOKED_UP", 6)
    head = table()
    head[[11, 37]] *= 2
    before = write(tmp_path / "a", {WTE: table(), HEAD: table()}, {**GPT2, "tie_word_embeddings": False})
    after = write(tmp_path / "b", {WTE: table(), HEAD: head}, {**GPT2, "tie_word_embeddings": False})
    page = page_of(before, after)
    search = Search.of(page)
    for number in range(4):
        looked_up = np.cumsum(search.numbers(f"table{number}-looked-up", 3)).tolist()
        assert {11, 37} <= set(looked_up) and len(looked_up) == 6
    assert page.one("p", class_="limits").text.count("Neighbours are given for 6 of 64 rows") == 1
