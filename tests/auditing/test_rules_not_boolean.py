"""BW114: a flag that is neither true nor false, and the loaders that refuse it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bowline.auditing import Severity
from tests.checkpoints import BERT, GPT2, HEAD, LLAVA, OWN, ROWS, T5, UNKNOWN, WTE, codes, one, table, write

EMBED = "model.embed_tokens.weight"
LLAVA_EMBED, LLAVA_HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"

NOT_BOOLEAN: dict[str, object] = {"null": None, "0": 0, "1": 1, "'false'": "false", "''": "", "an array of 0": []}
"""What stands in the config, as a message shows it."""


@pytest.mark.parametrize("shown", NOT_BOOLEAN)
def test_bw114_a_flag_that_is_neither_true_nor_false(tmp_path: Path, shown: str) -> None:
    value = NOT_BOOLEAN[shown]
    found = one(write(tmp_path, {WTE: table()}, {**GPT2, "tie_word_embeddings": value}), "BW114")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (HEAD, WTE), "config.json")
    assert found.flag_from_bytes is True
    read_as = "true" if value else "false"
    assert (
        found.message == f"tie_word_embeddings is {shown}, expected true or false; transformers 4 reads it as {read_as}"
    )


def test_bw114_two_matrices_make_the_flag_false(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table(), HEAD: OWN}, {**GPT2, "tie_word_embeddings": None}), "BW114")
    assert found.flag_from_bytes is False


def test_bw114_in_the_config_of_the_text(tmp_path: Path) -> None:
    config = {**LLAVA, "tie_word_embeddings": False, "text_config": {"vocab_size": ROWS, "tie_word_embeddings": 0}}
    found = one(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, config), "BW114")
    assert "text_config.tie_word_embeddings is 0" in found.message
    assert found.flag_from_bytes is False


def test_bw114_of_a_class_without_a_head_is_not_fixable(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["BertModel"], "tie_word_embeddings": None}
    found = one(write(tmp_path, {"embeddings.word_embeddings.weight": table()}, config), "BW114")
    assert (found.severity, found.fixable) == (Severity.ERROR, False)


def test_bw114_is_a_warning_where_no_version_refuses(tmp_path: Path) -> None:
    config = {**T5, "tie_word_embeddings": None}
    assert one(write(tmp_path, {"shared.weight": table(), HEAD: OWN}, config), "BW114").severity is Severity.WARNING
    config = {**UNKNOWN, "tie_word_embeddings": "false"}
    assert one(write(tmp_path, {EMBED: table(), HEAD: table()}, config), "BW114").severity is Severity.WARNING


def test_bw114_is_not_said_of_a_level_without_a_vocabulary(tmp_path: Path) -> None:
    config = {**LLAVA, "tie_word_embeddings": False, "vision_config": {"tie_word_embeddings": None}}
    assert codes(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, config)) == []
