"""The class of the padding row, never-trained rows, and untrained tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from bowline.auditing import audit
from bowline.auditing.evidence import Evidence
from bowline.auditing.progress import Progress
from bowline.auditing.report import FORMATS, Run
from bowline.auditing.row_scan import rounded
from bowline.auditing.row_statistics import PaddingClass, PaddingRow
from bowline.geometry import describe, diagnostics
from tests.checkpoints import GPT2, HEAD, LLAMA, OWN, WTE, bf16, table, write

Table = npt.NDArray[np.float32]
ROWS, COLUMNS = 512, 64


def evidence(path: Path, embedding: Any, **config: object) -> Evidence:
    rows = embedding.patterns.shape[0] if hasattr(embedding, "patterns") else len(embedding)
    return audit(write(path, {WTE: embedding}, {**GPT2, "vocab_size": rows, **config})).evidence


def padding(path: Path, embedding: Any, pad: int = 5, **config: object) -> PaddingRow | None:
    return evidence(path, embedding, pad_token_id=pad, **config).padding


def trained(seed: int = 0) -> Table:
    """Rows of many lengths, around a common mean: no table is drawn like this."""
    random = np.random.default_rng(seed)
    lengths = random.uniform(0.2, 3.0, size=(ROWS, 1))
    return (lengths * random.normal(size=(ROWS, COLUMNS)) + 0.3).astype(np.float32)


def with_row(row: Any, at: int = 5) -> Table:
    changed = trained()
    changed[at] = row
    return changed


# --- the padding row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_row_of_zeros_of_either_sign_is_zero(tmp_path: Path, zero: float) -> None:
    assert padding(tmp_path, with_row(zero)) == PaddingRow(id=5, row_class=PaddingClass.ZERO)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_that(tmp_path: Path, bad: float) -> None:
    assert padding(tmp_path, with_row(bad)) == PaddingRow(id=5, row_class=PaddingClass.NOT_FINITE)


@pytest.mark.parametrize("pad", [0, 5, 511])
def test_a_copy_names_another_row_and_never_itself(tmp_path: Path, pad: int) -> None:
    changed = trained()
    changed[[0, 5, 511]] = changed[200]
    found = padding(tmp_path, changed, pad)
    assert found is not None
    assert (found.row_class, found.copy_of) == (PaddingClass.COPY, 5 if pad == 0 else 0)


def test_the_mean_that_resizing_writes_is_the_mean(tmp_path: Path) -> None:
    rows = trained()
    rows[-1] = rows[:-1].mean(axis=0)
    assert padding(tmp_path, rows, ROWS - 1) == PaddingRow(id=ROWS - 1, row_class=PaddingClass.MEAN)


def test_the_mean_is_the_mean_in_bf16_as_well(tmp_path: Path) -> None:
    rows = trained()
    rows[-1] = rows[:-1].mean(axis=0)
    found = padding(tmp_path, bf16(rows), ROWS - 1)
    assert found is not None
    assert found.row_class is PaddingClass.MEAN


def test_a_row_as_short_as_the_mean_that_points_elsewhere_is_not_the_mean(tmp_path: Path) -> None:
    mean = trained().mean(axis=0)
    found = padding(tmp_path, with_row(np.roll(mean, 1) * np.tile([1, -1], COLUMNS // 2)))
    assert found is not None
    assert found.row_class is PaddingClass.TRAINED


def test_a_row_drawn_as_the_config_says_is_init_like(tmp_path: Path) -> None:
    row = 0.02 * np.random.default_rng(1).normal(size=COLUMNS)
    found = padding(tmp_path, with_row(row), initializer_range=0.02)
    assert found is not None
    assert found.row_class is PaddingClass.INIT_LIKE


def test_a_row_of_another_spread_is_trained(tmp_path: Path) -> None:
    row = 0.2 * np.random.default_rng(1).normal(size=COLUMNS)
    found = padding(tmp_path, with_row(row), initializer_range=0.02)
    assert found == PaddingRow(id=5, row_class=PaddingClass.TRAINED)


def test_a_row_of_a_fresh_table_is_init_like_whatever_the_config_says(tmp_path: Path) -> None:
    fresh = (0.7 * np.random.default_rng(1).normal(size=(ROWS, COLUMNS))).astype(np.float32)
    found = padding(tmp_path, fresh)
    assert found is not None
    assert found.row_class is PaddingClass.INIT_LIKE


@pytest.mark.parametrize("pad", [-1, ROWS, None, "5", True, 5.5, float("nan"), float("inf"), 10**400])
def test_what_is_no_row_is_no_padding_row(tmp_path: Path, pad: Any) -> None:
    assert padding(tmp_path, trained(), pad) is None


def test_the_id_of_a_nested_config_counts(tmp_path: Path) -> None:
    found = evidence(tmp_path, with_row(0), text_config={"pad_token_id": 5}).padding
    assert found == PaddingRow(id=5, row_class=PaddingClass.ZERO)


@pytest.mark.parametrize("spread", [0, -0.02, 1e308, 5e-324, float("nan"), float("inf"), 10**400, "0.02", None, [0.02]])
def test_a_spread_that_means_nothing_is_no_error(tmp_path: Path, spread: Any) -> None:
    found = padding(tmp_path, with_row(1), initializer_range=spread)
    assert found == PaddingRow(id=5, row_class=PaddingClass.TRAINED)


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
def test_a_fresh_table_is_told_by_the_lengths_of_its_rows(tmp_path: Path, std: float) -> None:
    fresh = (std * np.random.default_rng(1).normal(size=(ROWS, COLUMNS))).astype(np.float32)
    (described,) = evidence(tmp_path, fresh).tables
    assert described.drawn_std == pytest.approx(std, rel=0.05)


def test_a_trained_table_is_not_fresh(tmp_path: Path) -> None:
    (described,) = evidence(tmp_path, trained()).tables
    assert described.drawn_std is None


def glitched(count: int, of: int = 2048) -> tuple[Table, list[int]]:
    """A trained table with rows that gradients only ever pushed one way, and where they are."""
    random = np.random.default_rng(3)
    rows = random.normal(size=(of, COLUMNS))
    where = random.permutation(of)[:count]
    rows[where] = 0.05 * random.normal(size=(count, COLUMNS)) + np.ones(COLUMNS) / 8
    return rows.astype(np.float32), sorted(where.tolist())


@pytest.mark.parametrize("count", [32, 200, 1000])
def test_rows_that_were_never_trained_are_found_and_no_others(tmp_path: Path, count: int) -> None:
    rows, where = glitched(count)
    (described,) = evidence(tmp_path, rows).tables
    assert described.never_trained.tolist() == where


def test_a_table_too_small_to_tell_says_nothing(tmp_path: Path) -> None:
    (described,) = evidence(tmp_path, glitched(20, of=100)[0]).tables
    assert described.never_trained.tolist() == []


def test_each_matrix_of_an_untied_model_has_rows_of_its_own(tmp_path: Path) -> None:
    head = OWN.copy()
    head[7] = 0
    tensors = {"model.embed_tokens.weight": table(), HEAD: head}
    tables = audit(write(tmp_path, tensors, LLAMA)).evidence.tables
    assert {described.name: described.zero.tolist() for described in tables} == {
        "model.embed_tokens.weight": [],
        HEAD: [7],
    }


def test_two_equal_matrices_are_described_once(tmp_path: Path) -> None:
    tables = audit(write(tmp_path, {WTE: table(), HEAD: table()}, GPT2)).evidence.tables
    assert [described.name for described in tables] == [WTE]


def test_a_head_of_another_dtype_has_rows_of_its_own(tmp_path: Path) -> None:
    tables = audit(write(tmp_path, {WTE: table(), HEAD: bf16(table())}, GPT2)).evidence.tables
    assert [described.name for described in tables] == [WTE, HEAD]


# --- geometry of a large table --------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a table of 512 x 64 count as large: 192 rows are sampled, 100 are compared with all."""
    monkeypatch.setattr(diagnostics, "WHOLE_TABLE_BYTES", 100_000)
    monkeypatch.setattr(diagnostics, "SAMPLE_BYTES", 192 * COLUMNS * 4)
    monkeypatch.setattr(diagnostics, "LEAST_QUERIES", 100)
    monkeypatch.setattr(diagnostics, "QUERY_PRODUCTS", 0)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_the_geometry_of_the_audit_is_that_of_describe(tmp_path: Path, sampled: None, dtype: str) -> None:
    rows = trained().astype(np.float64)
    short: dict[str, Any] = {
        "F64": rows,
        "F32": trained(),
        "F16": trained().astype(np.float16),
        "BF16": rounded(trained(), "BF16"),
    }
    found = evidence(tmp_path, bf16(short[dtype]) if dtype == "BF16" else short[dtype]).geometry
    assert found == describe(short[dtype])
    assert found.standard_errors is not None
    assert (found.sampled_rows, found.queried_rows) == (192, 100)


def test_estimates_have_their_standard_error_in_text_and_json(tmp_path: Path, sampled: None) -> None:
    report = audit(write(tmp_path, {WTE: trained()}, {**GPT2, "vocab_size": ROWS}))
    text = FORMATS["full"](Run(reports=(report,), failures=()))
    assert f"{ROWS} rows of {COLUMNS}, 192 sampled, 100 compared with all (± one standard error)" in text
    assert re.search(r"self-decoding +\d+(\.\d+)?% ± \d", text)
    assert re.search(r"nearest cosine +0\.\d+ ± 0\.0\d+ ", text)
    assert re.search(r"mean cosine +-?0\.\d{3}  ", text)
    schema = json.loads((Path(__file__).parents[2] / "docs" / "audit.schema.json").read_text(encoding="utf-8"))
    record = json.loads(FORMATS["json"](Run(reports=(report,), failures=())))
    Draft202012Validator(schema).validate(record)
    assert {"self_decoding_rate", "median_nearest_cosine", "effective_rank"} <= set(
        record["checkpoints"][0]["geometry"]["standard_errors"]
    )


def test_figures_of_all_rows_have_no_standard_error(tmp_path: Path) -> None:
    report = audit(write(tmp_path, {WTE: trained()}, {**GPT2, "vocab_size": ROWS}))
    assert "±" not in FORMATS["full"](Run(reports=(report,), failures=()))


class Counted(Progress):
    """Adds up what is expected and what is done."""

    def __init__(self) -> None:
        self.expected = self.done = 0
        self._lock = Lock()

    def expect(self, count: int) -> None:
        self.expected += count

    def advance(self, count: int) -> None:
        with self._lock:
            self.done += count


@pytest.mark.parametrize("rows", [1, ROWS])
def test_progress_counts_the_scan_and_the_geometry(tmp_path: Path, sampled: None, rows: int) -> None:
    progress = Counted()
    audit(write(tmp_path, {WTE: trained()[:rows]}, {**GPT2, "vocab_size": rows}), progress=progress)
    assert progress.done == progress.expected == 2 * rows * COLUMNS * 4
