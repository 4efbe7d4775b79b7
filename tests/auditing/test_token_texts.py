"""Token texts beside the ids in findings: one wording for every finding that names rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bowline.cli import app
from tests.checkpoints import BERT, GPT2, HEAD, OWN, ROWS, WTE, codes, one, table, write

IDS = {f"t{at}": at for at in range(ROWS)}
TOKENIZER = {"tokenizer": {"model": {"vocab": IDS}}}
BIAS, DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"


def changed(*rows: int, value: float = 9.0) -> Any:
    values = table()
    values[list(rows)] = value + np.arange(len(rows), dtype=np.float32)[:, None]
    return values


def pair(directory: Path, head: Any, **files: object) -> Path:
    return write(directory, {WTE: table(), HEAD: head}, GPT2, files=files)


@pytest.mark.parametrize(
    ("rows", "ending"),
    [
        ((3,), "; it is row 3: 't3'"),
        ((3, 9), "; they are rows 3, 9; among them 't3', 't9'"),
        (tuple(range(3, 43)), "; the first are rows 3-10; among them 't3', 't5', 't7', 't10'"),
        ((62, 63), "; they are rows 62-63; among them 't62', 't63'"),
    ],
)
def test_rows_that_diverged_have_their_tokens(tmp_path: Path, rows: tuple[int, ...], ending: str) -> None:
    found = one(pair(tmp_path, changed(*rows), **TOKENIZER), "BW101")
    assert found.message.endswith(f"tie_word_embeddings is true{ending}")


def test_no_tokens_are_named_without_a_tokenizer_or_where_all_rows_differ(tmp_path: Path) -> None:
    for number, (head, files) in enumerate([(changed(3), {}), (OWN, TOKENIZER)]):
        assert one(pair(tmp_path / str(number), head, **files), "BW101").message.endswith("true")


def test_a_bias_that_diverged_has_the_tokens_of_its_entries(tmp_path: Path) -> None:
    bias, decoder = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32)
    decoder[[5, 6]] = 1
    tensors = {"bert.embeddings.word_embeddings.weight": table(), BIAS: bias, DECODER_BIAS: decoder}
    found = one(write(tmp_path, tensors, BERT, files=TOKENIZER), "BW110")
    assert found.message.endswith("; they are entries 5-6; among them 't5', 't6'")


@pytest.mark.parametrize(("value", "code"), [(0.0, "BW206"), (np.nan, "BW207")])
def test_zero_rows_and_rows_that_are_not_finite_have_their_tokens(tmp_path: Path, value: float, code: str) -> None:
    values = table()
    values[5] = value
    assert "(5): 't5'" in one(write(tmp_path, {WTE: values}, GPT2, files=TOKENIZER), code).message
    values[7] = value
    assert "(5, 7); among them 't5', 't7'" in one(write(tmp_path, {WTE: values}, GPT2, files=TOKENIZER), code).message


def test_rows_that_changed_since_the_base_have_their_tokens(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {WTE: table()}, GPT2)
    path = write(tmp_path / "model", {WTE: changed(3, 9)}, GPT2, files=TOKENIZER)
    printed = CliRunner().invoke(app, ["audit", str(path), "--base", str(base)]).output
    assert "2 of 64 rows changed (3, 9), by at most" in printed
    assert "; among them 't3', 't9'" in printed


def test_pieces_of_a_sentencepiece_model_and_lines_of_a_vocabulary_are_named(tmp_path: Path) -> None:
    (pair(tmp_path, changed(3)) / "vocab.txt").write_text("\n".join(IDS))
    assert one(tmp_path, "BW101").message.endswith("; it is row 3: 't3'")
    assert codes(tmp_path) == ["BW101"]
