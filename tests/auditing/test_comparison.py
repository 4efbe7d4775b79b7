"""`bowline compare`: the rows of two checkpoints are paired and their distances are those of the definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

import bowline
from bowline.auditing.report.comparison_text import render_comparison
from bowline.cli import app
from bowline.errors import NoCheckpointError
from tests.checkpoints import GPT2, HEAD, LLAMA, OWN, ROWS, WIDTH, WTE, bf16, codes, table, tied_gpt2, write

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "compare.schema.json").read_text())


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def vocabulary(names: list[str]) -> dict[str, object]:
    return {"tokenizer": {"model": {"type": "BPE", "vocab": {name: number for number, name in enumerate(names)}}}}


def tuned(directory: Path, moved: tuple[int, ...] = (5, 17), by: float = 0.5) -> Path:
    """The tied model with some rows moved by a share of their norm."""
    values = table()
    for row in moved:
        direction = np.random.default_rng(row).normal(size=WIDTH)
        values[row] += by * np.linalg.norm(values[row]) * direction / np.linalg.norm(direction)
    return write(directory, {WTE: values}, GPT2)


def test_a_checkpoint_equals_itself(tmp_path: Path) -> None:
    path = tied_gpt2(tmp_path / "a")
    report = bowline.compare(path, path)
    assert report.equal and [end.ends for end in report.ends] == [("embedding", "head")]
    assert run(path, path).exit_code == 0


def test_rows_that_moved_are_listed_by_how_far(tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: table()}, GPT2)
    values = table()
    values[5] *= 1.5
    values[17] *= 3
    after = write(tmp_path / "b", {WTE: values}, GPT2)
    (end,) = bowline.compare(before, after).ends
    assert end.moved.tolist() == [17, 5] and end.changes is not None
    np.testing.assert_allclose(end.changes.relative[[17, 5]], [2.0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(end.changes.cosine[[17, 5]], 1.0, atol=1e-6)
    result = run(before, after)
    assert result.exit_code == 1
    assert "2 of 64 rows moved, by 125 % of their norm in the median and 200 % at most" in result.stdout
    assert "row 17: 200 % of its norm, cosine 1.0000" in result.stdout


@pytest.mark.parametrize("by", [1e-6, 0.01, 4.0])
def test_the_distance_is_that_of_float64(tmp_path: Path, by: float) -> None:
    before, after = tied_gpt2(tmp_path / "a"), tuned(tmp_path / "b", by=by)
    report = bowline.compare(before, after)
    (end,) = report.ends
    assert end.changes is not None and sorted(end.moved.tolist()) == [5, 17]
    np.testing.assert_allclose(end.changes.relative[[5, 17]], by, rtol=0.15 if by == 1e-6 else 1e-4)


def test_each_end_is_compared_where_one_checkpoint_is_untied(tmp_path: Path) -> None:
    before = tied_gpt2(tmp_path / "a")
    after = write(tmp_path / "b", {WTE: table(), HEAD: OWN}, {**GPT2, "tie_word_embeddings": False})
    report = bowline.compare(before, after)
    moved = {end.ends: end.moved.size for end in report.ends}
    assert moved == {("embedding",): 0, ("head",): ROWS} and not report.equal


def test_an_untied_copy_has_equal_rows_but_another_state(tmp_path: Path) -> None:
    before = tied_gpt2(tmp_path / "a")
    after = write(tmp_path / "b", {WTE: table(), HEAD: table()}, {**GPT2, "tie_word_embeddings": False})
    report = bowline.compare(before, after)
    assert [end.moved.size for end in report.ends] == [0, 0] and not report.equal


def test_a_cast_is_recognised(tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: bf16(table())}, GPT2)
    (end,) = bowline.compare(before, after).ends
    assert end.changes is not None and 0 < np.nanmax(end.changes.relative) < 0.01


def test_added_rows_are_only_after(tmp_path: Path) -> None:
    before = tied_gpt2(tmp_path / "a")
    after = write(tmp_path / "b", {WTE: np.vstack([table(), table(3, seed=9)])}, {**GPT2, "vocab_size": ROWS + 3})
    report = bowline.compare(before, after)
    assert report.pairs.only_after.tolist() == [64, 65, 66] and not report.pairs.only_before.size
    assert "3 only after (64-66)" in render_comparison(report) and not report.equal


def test_rows_are_paired_by_token_where_ids_differ(tmp_path: Path) -> None:
    names = [f"token{number}" for number in range(ROWS)]
    kept = [0, 3, 9, 20, 63]
    before = write(tmp_path / "a", {WTE: table()}, GPT2, files=vocabulary(names))
    after = write(
        tmp_path / "b",
        {WTE: table()[kept]},
        {**GPT2, "vocab_size": len(kept)},
        files=vocabulary([names[row] for row in kept]),
    )
    report = bowline.compare(before, after)
    assert report.pairs.by == "token"
    assert report.pairs.before.tolist() == kept and report.pairs.after.tolist() == list(range(5))
    (end,) = report.ends
    assert not end.moved.size and report.pairs.only_before.size == ROWS - 5


def test_tokens_are_named_with_their_rows(tmp_path: Path) -> None:
    names = [f"token{number}" for number in range(ROWS)]
    before = write(tmp_path / "a", {WTE: table()}, GPT2, files=vocabulary(names))
    values = table()
    values[9] += 1
    after = write(tmp_path / "b", {WTE: values}, GPT2, files=vocabulary(names))
    assert "row 9 'token9': " in run(before, after).stdout


def test_rows_of_zeros_and_rows_that_are_not_finite(tmp_path: Path) -> None:
    first, second = table(), table()
    first[1], second[2], second[3] = 0, np.nan, 0
    before, after = write(tmp_path / "a", {WTE: first}, GPT2), write(tmp_path / "b", {WTE: second}, GPT2)
    text = run(before, after).stdout
    assert "row 1: was zero" in text and "row 2: not finite on one side" in text
    assert "row 3: 100 % of its norm, is zero\n" in text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: write(path, {WTE: table(ROWS, WIDTH + 1)}, GPT2), "rows of 8 values and of 9"),
        (lambda path: write(path, {WTE: table().astype(np.int32)}, GPT2), "stored as I32"),
    ],
)
def test_tables_that_cannot_be_compared_say_why(make: object, reason: str, tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), make(tmp_path / "b")  # type: ignore[operator]
    report = bowline.compare(before, after)
    assert reason in (report.ends[0].reason or "") and not report.equal
    assert f"not compared: {report.ends[0].reason}" in render_comparison(report)


def test_checkpoints_without_a_common_end(tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {"x": table()}, LLAMA)
    assert "no end is stored in both" in run(before, after).stdout
    assert run(before, after).exit_code == 1 and codes(before) == []


def test_json_keeps_to_its_schema(tmp_path: Path) -> None:
    first, second = table(), table()
    first[1], second[2], second[5] = 0, np.nan, 7
    before, after = write(tmp_path / "a", {WTE: first}, GPT2), write(tmp_path / "b", {WTE: second, HEAD: OWN}, GPT2)
    found = json.loads(run(before, after, "--output-format", "json").stdout)
    Draft202012Validator(SCHEMA).validate(found)
    assert found["equal"] is False and found["paired_by"] == "id"
    assert {row["before"] for row in found["ends"][0]["rows"]} == {1, 2, 5}


def test_a_notebook_shows_both_verdicts(tmp_path: Path) -> None:
    before, after = tied_gpt2(tmp_path / "a"), tuned(tmp_path / "<b>")
    shown = bowline.compare(before, after)._repr_html_()
    assert "2 of 64 rows moved" in shown and "&lt;b&gt;" in shown and "<b>/" not in shown


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="none: no such file or directory"):
        bowline.compare(tied_gpt2(tmp_path / "a"), tmp_path / "none")


def test_tables_that_cannot_be_compared_are_not_said_to_differ(tmp_path: Path) -> None:
    before, after = (write(tmp_path / name, {WTE: table().astype(np.int32)}, GPT2) for name in "ab")
    report = bowline.compare(before, after)
    assert not report.equal and not report.different
    assert render_comparison(report).endswith("Not all rows were compared.")


def test_rows_of_another_length_differ_without_a_comparison(tmp_path: Path) -> None:
    report = bowline.compare(tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: table(ROWS, WIDTH + 1)}, GPT2))
    assert report.different and render_comparison(report).endswith("Different.")


def test_a_table_without_rows_says_so(tmp_path: Path) -> None:
    before = write(tmp_path / "a", {WTE: table()[:0]}, GPT2)
    assert bowline.compare(before, before).ends[0].reason == f"{WTE} has the shape [0, 8], expected rows"


def test_equal_rows_with_other_tokens_are_named(tmp_path: Path) -> None:
    names = [f"token{number}" for number in range(ROWS)]
    before = write(tmp_path / "a", {WTE: table()}, GPT2, files=vocabulary(names))
    after = write(tmp_path / "b", {WTE: table()}, GPT2, files=vocabulary([*names[:-3], "x", "y", names[-1]]))
    report = bowline.compare(before, after)
    assert report.equal and report.pairs.renamed.tolist() == [61, 62]
    assert "2 with another token after (61-62)" in render_comparison(report)


def test_a_second_token_of_a_row_is_not_another_token(tmp_path: Path) -> None:
    names = {f"token{number}": number for number in range(ROWS)}
    paths = [
        write(tmp_path / name, {WTE: table()}, GPT2, files={"tokenizer": {"model": {"type": "BPE", "vocab": ids}}})
        for name, ids in (("a", names), ("b", {**names, "second": 5}), ("c", {"token1": 1}))
    ]
    for other in paths[1:]:
        assert not bowline.compare(paths[0], other).pairs.renamed.size
        assert not bowline.compare(other, paths[0]).pairs.renamed.size


def test_changes_over_the_range_of_float64_have_a_median(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(scale), {WTE: table().astype(np.float64) * scale}, GPT2) for scale in (1e-305, 1e305)]
    report = bowline.compare(*paths)
    assert "by 1e+302 % of their norm in the median and 1e+302 % at most" in render_comparison(report)
    assert report.as_dict()["ends"][0]["median_relative_change"] == 1e300
