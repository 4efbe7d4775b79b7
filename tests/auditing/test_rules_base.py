"""`--base`: embedding and head beside the original's, row by row, and BW115, which only this comparison can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from bowline import audit
from bowline.auditing.base_comparison import TableComparison
from bowline.auditing.difference import Cause
from bowline.cli import app
from bowline.errors import NoCheckpointError, UsageError
from tests.checkpoints import GPT2, HEAD, WTE, bf16, codes, one, write

ROWS, COLUMNS = 320, 136
SIZED = {**GPT2, "vocab_size": ROWS}
Table = npt.NDArray[np.float32]


def table(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> Table:
    return (0.02 * np.random.default_rng(seed).normal(size=(rows, columns))).astype(np.float32)


def with_adapter(values: Table, rank: int = 4) -> Table:
    """The table after a LoRA of this rank was merged into it."""
    random = np.random.default_rng(7)
    left, right = random.normal(size=(len(values), rank)), random.normal(size=(rank, values.shape[1]))
    merged: Table = (values + 0.01 * left @ right / np.sqrt(rank)).astype(np.float32)
    return merged


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", {WTE: table()}, SIZED)


def compared(path: Path, base: Path) -> tuple[TableComparison, ...]:
    found = audit(path, base=base).evidence.base
    assert found is not None
    assert found.location == str(base)
    return found.tables


def test_one_matrix_that_did_not_change_is_equal_for_both_ends(tmp_path: Path, base: Path) -> None:
    (both,) = compared(write(tmp_path / "a", {WTE: table()}, SIZED), base)
    assert (both.ends, both.difference, str(both)) == (("embedding", "head"), None, "equal in all 320 rows")


def test_bw115_an_adapter_merged_into_a_tied_matrix_is_seen_only_with_the_base(tmp_path: Path, base: Path) -> None:
    path = write(tmp_path / "a", {WTE: with_adapter(table())}, SIZED)
    assert codes(path) == []
    found = one(path, "BW115", base=base)
    assert f"{WTE} serves as embedding and head, and differs from {base}" in found.message
    assert "a merged low-rank delta of rank 4 (320 of 320 rows" in found.message


def test_bw115_an_equal_copy_is_tied_too(tmp_path: Path, base: Path) -> None:
    merged = with_adapter(table())
    assert one(write(tmp_path / "a", {WTE: merged, HEAD: merged}, SIZED), "BW115", base=base)


@pytest.mark.parametrize("dtype", ["base", "checkpoint", "both"])
def test_bw115_the_rounding_of_either_dtype_hides_no_adapter(tmp_path: Path, dtype: str) -> None:
    merged: Any = with_adapter(table())
    original = write(tmp_path / "b", {WTE: table() if dtype == "checkpoint" else bf16(table())}, SIZED)
    path = write(tmp_path / "a", {WTE: merged if dtype == "base" else bf16(merged)}, SIZED)
    assert "of rank 4" in one(path, "BW115", base=original).message


def test_bw115_is_not_said_of_an_untied_head_with_an_adapter(tmp_path: Path, base: Path) -> None:
    untied = {**SIZED, "tie_word_embeddings": False}
    path = write(tmp_path / "a", {WTE: table(), HEAD: with_adapter(table())}, untied)
    assert "BW115" not in codes(path, base=base)
    embedding, head = compared(path, base)
    assert (embedding.ends, embedding.difference) == (("embedding",), None)
    assert (head.ends, head.base_tensor) == (("head",), WTE)
    assert head.difference is not None
    assert (head.difference.cause, head.difference.rank) == (Cause.LOW_RANK, 4)


def test_bw115_is_not_said_of_training_of_all_rows(tmp_path: Path, base: Path) -> None:
    path = write(tmp_path / "a", {WTE: table() + table(seed=5) / 10}, SIZED)
    (both,) = compared(path, base)
    assert str(both).startswith("320 of 320 rows changed, by at most 0.00")
    assert "BW115" not in codes(path, base=base)


def test_the_rows_that_changed_are_named(tmp_path: Path, base: Path) -> None:
    changed = table()
    changed[[3, 17]] += 1
    (both,) = compared(write(tmp_path / "a", {WTE: changed}, SIZED), base)
    assert str(both) == "2 of 320 rows changed (3, 17), by at most 1"


def test_of_a_resized_table_the_common_rows_are_compared(tmp_path: Path, base: Path) -> None:
    longer = np.concatenate([table(), table(10, seed=3)])
    (both,) = compared(write(tmp_path / "a", {WTE: longer}, {**SIZED, "vocab_size": 330}), base)
    assert str(both) == "equal in all 320 rows; 10 rows more than the base's 320"
    (both,) = compared(base, write(tmp_path / "b", {WTE: longer}, {**SIZED, "vocab_size": 330}))
    assert str(both) == "equal in all 320 rows; 10 rows fewer than the base's 330"


def test_tables_that_cannot_be_compared_say_why(tmp_path: Path, base: Path) -> None:
    (narrow,) = compared(write(tmp_path / "a", {WTE: table(columns=64)}, SIZED), base)
    assert str(narrow) == "not compared: rows of [64], and of [136] in the base"
    (codes_,) = compared(write(tmp_path / "b", {WTE: np.ones((ROWS, COLUMNS), np.int8)}, SIZED), base)
    assert "stored as I8, and only floating-point tables are compared" in str(codes_)


def test_the_report_of_the_command_has_the_comparison_in_text_and_json(tmp_path: Path, base: Path) -> None:
    path = write(tmp_path / "a", {WTE: with_adapter(table())}, SIZED)
    text = CliRunner().invoke(app, ["audit", str(path), "--base", str(base)])
    assert text.exit_code == 1
    assert f"  base       {base}\n    embedding, head {WTE}: 320 of 320 rows changed, by at most" in text.output
    run = CliRunner().invoke(app, ["audit", str(path), "--base", str(base), "--output-format", "json"])
    (record,) = json.loads(run.output)["checkpoints"]
    assert record["base"]["path"] == str(base)
    (found,) = record["base"]["tables"]
    assert (found["ends"], found["rows_differing"], found["some_rows"][:2]) == (["embedding", "head"], 320, [0, 1])
    assert found["looks_like"] == "a merged low-rank delta of rank 4"


def test_a_base_that_cannot_be_read_or_compared_is_an_error(tmp_path: Path, base: Path) -> None:
    with pytest.raises(NoCheckpointError, match="gone"):
        audit(base, base=tmp_path / "gone")
    with pytest.raises(UsageError, match="base is compared by values"):
        audit(base, base=base, values=False)
    assert CliRunner().invoke(app, ["audit", str(base), "--base", str(tmp_path / "gone")]).exit_code == 2
