"""BW201 to BW211, rows that do not match the ids or have odd values: each code with a near miss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bowline.auditing import Severity
from tests.checkpoint.sentencepiece_files import model
from tests.checkpoints import (
    BART,
    BERT,
    GPT2,
    HEAD,
    LLAMA,
    OWN,
    ROWS,
    T5,
    WTE,
    codes,
    findings,
    one,
    table,
    tied_gpt2,
    write,
)

EMBED = "model.embed_tokens.weight"
BERT_EMBED = "bert.embeddings.word_embeddings.weight"


def with_rows(rows: Mapping[int, Any], seed: int = 0) -> npt.NDArray[np.float32]:
    changed = table(seed=seed)
    for at, row in rows.items():
        changed[at] = row
    return changed


def tokenizer(largest: int, added: int | None = None) -> dict[str, object]:
    extra = [] if added is None else [{"id": added, "content": "<new>"}]
    return {"model": {"vocab": {f"t{number}": number for number in range(largest + 1)}}, "added_tokens": extra}


# --- BW201 vocab-size-mismatch --------------------------------------------------------------------------------------


def test_bw201_a_table_of_another_length_than_the_config_says(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table(72)}, GPT2), "BW201")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (WTE,), "config.json")
    assert (found.help, found.fixable) == ("set vocab_size to 72", False)


def test_bw201_a_bias_left_behind_by_a_resize(tmp_path: Path) -> None:
    tensors = {"model.shared.weight": table(), "final_logits_bias": np.zeros((1, 72), np.float32)}
    found = one(write(tmp_path, tensors, BART), "BW201")
    assert found.tensors == ("final_logits_bias",)
    assert found.help == "resize all vocabulary tensors alike"


def test_bw201_the_size_in_a_nested_config_counts(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"vocab_size": 72},
    }
    found = one(write(tmp_path, {"language_model.model.embed_tokens.weight": table()}, config), "BW201")
    assert "text_config.vocab_size is 72" in found.message


def test_bw201_is_not_said_where_the_config_states_no_size(tmp_path: Path) -> None:
    silent = {key: value for key, value in GPT2.items() if key != "vocab_size"}
    assert codes(write(tmp_path, {WTE: table(72)}, silent)) == []


def test_bw201_is_not_said_of_a_tensor_that_lacks_the_axis(tmp_path: Path) -> None:
    tensors = {"model.shared.weight": table(), "final_logits_bias": np.zeros(64, np.float32)}
    assert codes(write(tmp_path, tensors, BART)) == []


def test_bw201_is_not_said_of_a_tensor_without_a_vocabulary_axis(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(), "transformer.wpe.weight": table(72)}, GPT2)) == []


# --- BW202 tokenizer-larger -----------------------------------------------------------------------------------------


def test_bw202_an_added_token_without_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table()}, GPT2, files={"tokenizer": tokenizer(63, added=64)})
    found = one(path, "BW202")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (WTE,), "tokenizer.json")
    assert "1 id beyond the table's 64 rows, up to 64 ('<new>')" in found.message


@pytest.mark.parametrize("file", ["vocab", "added_tokens"])
def test_bw202_the_other_files_of_a_tokenizer_count(tmp_path: Path, file: str) -> None:
    assert one(write(tmp_path, {WTE: table()}, GPT2, files={file: {"a": 64}}), "BW202").file == f"{file}.json"


def test_bw202_is_not_said_of_the_last_row(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table()}, GPT2, files={"tokenizer": tokenizer(62, added=63)})) == []


# --- BW203 special-id-out-of-range ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 64, 10**30])
def test_bw203_an_id_that_is_no_row(tmp_path: Path, bad: int) -> None:
    found = one(tied_gpt2(tmp_path, eos_token_id=bad), "BW203")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (), "config.json")
    assert found.message == f"eos_token_id: {bad}, but ids run from 0 to 63"


def test_bw203_one_of_several_ids_and_one_in_a_nested_config(tmp_path: Path) -> None:
    found = one(tied_gpt2(tmp_path, eos_token_id=[2, 64], text_config={"bos_token_id": 99}), "BW203")
    assert "eos_token_id[1]: 64, text_config.bos_token_id: 99" in found.message


@pytest.mark.parametrize("sound", [0, 63, None, [0, 63], "64", True])
def test_bw203_is_not_said_of_rows_and_of_what_is_no_id(tmp_path: Path, sound: object) -> None:
    assert codes(tied_gpt2(tmp_path, eos_token_id=sound)) == []


# --- BW204 padding-row ----------------------------------------------------------------------------------------------


def padded(directory: Path, row: Any, **config: object) -> Path:
    return write(directory, {WTE: with_rows({3: row})}, {**GPT2, "pad_token_id": 3, **config})


def test_bw204_a_zero_row_under_a_tied_head_is_a_warning(tmp_path: Path) -> None:
    trained = table() * np.linspace(0.5, 2.0, ROWS, dtype=np.float32)[:, None]  # norms as training spreads them
    trained[3] = 0
    found = one(write(tmp_path, {WTE: trained}, {**GPT2, "pad_token_id": 3}), "BW204")
    assert (found.severity, found.tensors, found.fixable) == (Severity.WARNING, (WTE,), False)
    assert "row 3 (pad_token_id) is zero and the head is tied: its logit is 0 plus the bias" in found.message


def test_bw204_a_zero_row_of_a_fresh_table_is_information(tmp_path: Path) -> None:
    assert one(padded(tmp_path, 0), "BW204").severity is Severity.INFO


def test_bw204_a_trained_row_is_information(tmp_path: Path) -> None:
    found = one(padded(tmp_path, 1), "BW204")
    assert found.severity is Severity.INFO
    assert "is trained: a tied head trains it" in found.message


@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        ({"eos_token_id": 3}, {}, "eos_token_id"),
        ({"eos_token_id": [5, 3], "bos_token_id": 3}, {}, "eos_token_id[1]"),
        ({"text_config": {"eos_token_id": 3}}, {}, "text_config.eos_token_id"),
        (
            {"eos_token_id": 5},
            {"generation_config": {"eos_token_id": [5, 3]}},
            "eos_token_id[1] of generation_config.json",
        ),
        ({}, {"tokenizer_config": {"eos_token": "t3", "pad_token": "t3"}}, "the tokenizer's eos_token"),
        ({}, {"special_tokens_map": {"eos_token": {"content": "t3"}}}, "the tokenizer's eos_token"),
    ],
)
def test_bw204_a_row_that_is_the_end_of_text_too_is_trained_as_a_label(
    tmp_path: Path, config: dict[str, Any], files: dict[str, object], named: str
) -> None:
    files = {"tokenizer": tokenizer(63), **files}
    path = write(tmp_path, {WTE: with_rows({3: 1})}, {**GPT2, "pad_token_id": 3, **config}, files=files)
    found = one(path, "BW204")
    assert found.message == f"row 3 (pad_token_id) is trained: it is also {named}, so it is trained as a label"
    assert "mask padded labels by the attention mask" in found.help


def test_bw204_a_zero_row_that_is_the_end_of_text_too_must_not_be_masked(tmp_path: Path) -> None:
    trained = table() * np.linspace(0.5, 2.0, ROWS, dtype=np.float32)[:, None]
    trained[3] = 0
    found = one(write(tmp_path, {WTE: trained}, {**GPT2, "pad_token_id": 3, "eos_token_id": 3}), "BW204")
    assert found.message.startswith("row 3 (pad_token_id, also eos_token_id) is zero and the head is tied")
    assert found.help.startswith("take the row from an earlier checkpoint")


def test_bw204_a_row_that_begins_the_decoders_texts_is_trained_by_both(tmp_path: Path) -> None:
    config = {**T5, "pad_token_id": 3, "decoder_start_token_id": 3, "eos_token_id": 1}
    assert one(write(tmp_path, {"shared.weight": with_rows({3: 1})}, config), "BW204").message == (
        "row 3 (pad_token_id) is trained: every input of the decoder begins with it (decoder_start_token_id) and a "
        "tied head trains it through the softmax's denominator"
    )


@pytest.mark.parametrize("broken", ["{", "[]", '{"eos_token_id": "3"}'])
def test_bw204_says_what_it_says_without_a_generation_config_that_can_be_read(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path, {WTE: with_rows({3: 1})}, {**GPT2, "pad_token_id": 3}, files={"generation_config": broken})
    assert "is trained: a tied head trains it" in one(path, "BW204").message


def test_bw204_a_copy_names_the_row_that_it_repeats(tmp_path: Path) -> None:
    assert "is a copy of row 9" in one(padded(tmp_path, table()[9]), "BW204").message


def test_bw204_is_not_said_of_a_zero_row_under_a_head_of_its_own(tmp_path: Path) -> None:
    tensors = {EMBED: with_rows({3: 0}), HEAD: OWN}
    assert codes(write(tmp_path, tensors, {**LLAMA, "pad_token_id": 3})) == []


@pytest.mark.parametrize("pad", [None, -1, 64, 1.5, "3"])
def test_bw204_is_not_said_without_a_padding_row(tmp_path: Path, pad: object) -> None:
    assert "BW204" not in codes(tied_gpt2(tmp_path, pad_token_id=pad))


# --- BW205 duplicate-rows -------------------------------------------------------------------------------------------


def test_bw205_rows_that_are_the_same(tmp_path: Path) -> None:
    rows = {5: 1.5, 6: 1.5, 7: 1.5, 20: 2.5, 40: 2.5}
    found = one(write(tmp_path, {WTE: with_rows(rows)}, GPT2), "BW205")
    assert (found.severity, found.tensors) == (Severity.INFO, (WTE,))
    assert "5 rows in 2 groups of equal rows, the largest of 3 (5-7)" in found.message


def test_bw205_is_not_said_of_the_same_numbers_in_another_order(tmp_path: Path) -> None:
    rows = {5: np.arange(8), 6: np.arange(8)[::-1]}
    assert codes(write(tmp_path, {WTE: with_rows(rows)}, GPT2)) == []


def test_bw205_is_not_said_of_a_table_and_its_equal_head(tmp_path: Path) -> None:
    assert "BW205" not in codes(write(tmp_path, {WTE: table(), HEAD: table()}, GPT2))


# --- BW206 zero-rows ------------------------------------------------------------------------------------------------


def test_bw206_output_rows_of_zeros_are_a_warning(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: with_rows({62: 0.0, 63: -0.0})}, GPT2), "BW206")
    assert (found.severity, found.tensors) == (Severity.WARNING, (WTE,))
    assert "2 rows of zeros (62-63); as output rows they win" in found.message


def test_bw206_input_rows_of_zeros_are_information(tmp_path: Path) -> None:
    found = one(write(tmp_path, {EMBED: with_rows({63: 0}), HEAD: OWN}, LLAMA), "BW206")
    assert (found.severity, found.tensors) == (Severity.INFO, (EMBED,))


def test_bw206_zeros_in_a_head_of_its_own_are_found_there(tmp_path: Path) -> None:
    found = one(write(tmp_path, {EMBED: table(), HEAD: with_rows({63: 0}, seed=1)}, LLAMA), "BW206")
    assert (found.severity, found.tensors) == (Severity.WARNING, (HEAD,))


def test_bw206_is_not_said_of_the_padding_row(tmp_path: Path) -> None:
    assert "BW206" not in codes(padded(tmp_path, 0))


def test_bw206_is_not_said_of_the_smallest_number(tmp_path: Path) -> None:
    row = np.zeros(8, np.float32)
    row[7] = np.finfo(np.float32).smallest_subnormal
    assert codes(write(tmp_path, {WTE: with_rows({63: row})}, GPT2)) == []


# --- BW207 not-finite-rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bw207_one_value_that_is_not_finite(tmp_path: Path, bad: float) -> None:
    row = table()[10]
    row[7] = bad
    found = one(write(tmp_path, {WTE: with_rows({10: row})}, GPT2), "BW207")
    assert (found.severity, found.tensors, found.fixable) == (Severity.ERROR, (WTE,), False)
    assert "1 row with NaN or infinite values (10)" in found.message


def test_bw207_is_not_said_of_the_largest_number(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: with_rows({10: np.finfo(np.float32).max})}, GPT2)) == []


# --- BW208 never-trained-rows ---------------------------------------------------------------------------------------


def partly_trained(untrained: int, *, common: float) -> npt.NDArray[np.float32]:
    """Long rows in all directions, and short ones with a share of one direction in common."""
    random = np.random.default_rng(3)
    rows = random.normal(size=(1024, 64))
    direction = np.ones(64) / 8
    short = 0.05 * random.normal(size=(untrained, 64)) + common * direction
    rows[:untrained] = short
    return rows.astype(np.float32)


def test_bw208_short_rows_that_point_one_way(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: partly_trained(100, common=1.0)}, {**GPT2, "vocab_size": 1024})
    found = one(path, "BW208")
    assert (found.severity, found.tensors) == (Severity.INFO, (WTE,))
    assert "100 rows (9.8%) that look untrained (0-99)" in found.message


def test_bw208_is_not_said_of_short_rows_that_point_every_way(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: partly_trained(100, common=0.0)}, {**GPT2, "vocab_size": 1024})) == []


def test_bw208_is_not_said_of_a_fresh_table(tmp_path: Path) -> None:
    fresh = table(1024, 64) * np.float32(0.02)
    assert codes(write(tmp_path, {WTE: fresh}, {**GPT2, "vocab_size": 1024, "initializer_range": 0.02})) == []


def test_bw208_is_not_said_where_all_rows_point_one_way(tmp_path: Path) -> None:
    narrow = table(1024, 64) + np.float32(5)
    assert codes(write(tmp_path, {WTE: narrow}, {**GPT2, "vocab_size": 1024})) == []


def with_unused(rows: int = 4096, width: int = 64, noise: float = 0.014, **groups: range) -> npt.NDArray[np.float32]:
    """A table like Gemma's: all rows are of one length, and those of each group have a cosine of .9999 by default."""
    random = np.random.default_rng(5)
    values = random.normal(size=(rows, width)) + 0.5
    for group in groups.values():
        values[list(group)] = random.normal(size=width) + 0.5 + noise * random.normal(size=(len(group), width))
    unit: npt.NDArray[np.float32] = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    return unit


def unused_gpt2(directory: Path, values: Any, **files: object) -> Path:
    return write(directory, {WTE: values}, {**GPT2, "vocab_size": len(values)}, files=files)


def test_bw208_rows_that_are_nearly_equal_although_as_long_as_all_others(tmp_path: Path) -> None:
    names = {f"<unused{at}>": 7 + at for at in range(99)} | {"<unused\x1b[2J>": 106}
    path = unused_gpt2(tmp_path, with_unused(unused=range(7, 107)), tokenizer={"model": {"vocab": names}})
    found = one(path, "BW208")
    assert (found.severity, found.tensors) == (Severity.INFO, (WTE,))
    assert found.message == (
        f"{WTE} has 100 rows (2.4%) that look untrained (7-106): they are equal up to noise; "
        "among them '<unused0>', '<unused33>', '<unused66>', '<unused\\x1b[2J>'"
    )


def test_bw208_several_groups_are_one_finding(tmp_path: Path) -> None:
    found = one(unused_gpt2(tmp_path, with_unused(one=range(7, 17), other=range(4000, 4005))), "BW208")
    assert "15 rows (0.4%) that look untrained (7-16, 4000-4004): within each of 2 groups they are" in found.message


def test_bw208_short_rows_and_nearly_equal_rows_are_two_findings(tmp_path: Path) -> None:
    values = partly_trained(100, common=1.0)
    values[500:520] = values[500] + np.float32(0.001) * values[520:540]
    short, equal = (found for found in findings(unused_gpt2(tmp_path, values)) if found.code == "BW208")
    assert "(0-99): they are short and point in one direction" in short.message
    assert "(500-519): they are equal up to noise" in equal.message


def test_bw208_is_not_said_twice_of_short_rows_that_are_nearly_equal(tmp_path: Path) -> None:
    values = partly_trained(100, common=1.0)
    values[:100] = values[0] + np.float32(0.001) * values[100:200]
    assert "they are short" in one(unused_gpt2(tmp_path, values), "BW208").message


def test_bw208_is_not_said_of_rows_that_are_the_same_and_like_no_other(tmp_path: Path) -> None:
    assert codes(unused_gpt2(tmp_path, with_unused(noise=0.0, unused=range(7, 107)))) == ["BW205"]


def test_bw208_is_not_said_of_rows_that_are_only_similar(tmp_path: Path) -> None:
    assert codes(unused_gpt2(tmp_path, with_unused(noise=0.2, unused=range(7, 107)))) == []


def test_bw208_is_not_said_of_three_rows(tmp_path: Path) -> None:
    assert codes(unused_gpt2(tmp_path, with_unused(unused=range(7, 10)))) == []


def test_bw208_nearly_equal_rows_are_found_where_all_rows_point_one_way(tmp_path: Path) -> None:
    narrow = table(1024, 64) + np.float32(5)
    narrow[10:30] = narrow[10] + np.float32(0.01) * table(20, 64, seed=3)
    assert "20 rows (2.0%) that look untrained (10-29)" in one(unused_gpt2(tmp_path, narrow), "BW208").message


# --- BW209 uneven-rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "next_multiple"), [(65, 128), (63, 64), (60, 64)])
def test_bw209_rows_that_are_not_a_multiple_of_eight(tmp_path: Path, rows: int, next_multiple: int) -> None:
    found = one(write(tmp_path, {WTE: table(rows)}, {**GPT2, "vocab_size": rows}), "BW209")
    assert (found.severity, found.tensors) == (Severity.INFO, (WTE,))
    assert found.message.endswith(f"the next multiple of 64 is {next_multiple}")


def test_bw209_is_not_said_of_a_multiple_of_eight(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(72)}, {**GPT2, "vocab_size": 72})) == []


# --- BW210 vocabularies-differ --------------------------------------------------------------------------------------

LETTERS = {chr(97 + at): at for at in range(10)}


def with_vocabulary(directory: Path, lines: str, vocabulary: Mapping[str, int] = LETTERS) -> Path:
    (tied_gpt2(directory) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (directory / "vocab.txt").write_text("\n".join(lines) + "\n")
    return directory


def test_bw210_another_token_under_an_id(tmp_path: Path) -> None:
    found = one(with_vocabulary(tmp_path, "abcdefghji"), "BW210")
    assert (found.severity, found.file) == (Severity.WARNING, "vocab.txt")
    assert found.message == (
        "2 ids have other tokens in vocab.txt than in tokenizer.json: 8 is 'j', and 'i' in tokenizer.json"
    )


def test_bw210_another_number_of_tokens(tmp_path: Path) -> None:
    (tied_gpt2(tmp_path) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": LETTERS}}))
    (tmp_path / "tokenizer.model").write_bytes(model((token, 0.0, 1) for token in "abcdefghijkl"))
    assert one(tmp_path, "BW210").message == "tokenizer.model has 12 tokens, and tokenizer.json 10"


def test_bw210_is_not_said_of_equal_vocabularies(tmp_path: Path) -> None:
    assert codes(with_vocabulary(tmp_path, "abcdefghij")) == []


def test_bw210_is_not_said_of_minilm(minilm: Path) -> None:
    assert (minilm / "vocab.txt").exists()
    assert "BW210" not in codes(minilm, values=False)


def test_bw202_pieces_and_lines_beyond_the_rows(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"t{at}\n" for at in range(ROWS + 1)))
    assert "(vocab.txt) has 1 id beyond the table's 64 rows, up to 64 ('t64')" in one(tmp_path, "BW202").message
    (tmp_path / "tokenizer.model").write_bytes(model((f"t{at}", 0.0, 1) for at in range(ROWS + 2)))
    assert "(tokenizer.model) has 2 ids beyond" in one(tmp_path, "BW202").message
    (tmp_path / "tokenizer.model").write_bytes(model((f"t{at}", 0.0, 1) for at in range(ROWS)))
    assert codes(tmp_path) == []


def test_bw404_a_damaged_sentencepiece_model(tmp_path: Path) -> None:
    (tied_gpt2(tmp_path) / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    found = one(tmp_path, "BW404")
    assert (found.file, found.severity) == ("tokenizer.model", Severity.WARNING)
    assert found.message.startswith("tokenizer.model: not a SentencePiece model: ")


# --- BW211 odd-norms ------------------------------------------------------------------------------------------------


def with_norms(factors: Mapping[int, float], rows: int = 1024, width: int = 64) -> npt.NDArray[np.float32]:
    values = table(rows, width)
    for row, factor in factors.items():
        values[row] *= np.float32(factor)
    return values


def test_bw211_short_rows_with_their_tokens(tmp_path: Path) -> None:
    tokens = {"<a>": 7, "<b>": 1022, "<c>": 1023}
    path = unused_gpt2(tmp_path, with_norms({7: 0.4, 1022: 0.4, 1023: 0.3}), tokenizer={"model": {"vocab": tokens}})
    found = one(path, "BW211")
    assert (found.severity, found.tensors) == (Severity.INFO, (WTE,))
    assert f"{WTE} has 3 rows with norms far below all others, 2.5 to 3.3 where the median is 8" in found.message
    assert found.message.endswith("(7, 1022-1023); among them '<a>', '<b>', '<c>'")
    assert 'resize_vocab(new_rows="scaled-mean")' in found.help


def test_bw211_a_long_row(tmp_path: Path) -> None:
    found = one(unused_gpt2(tmp_path, with_norms({5: 3})), "BW211")
    assert "has 1 row with a norm far above all others" in found.message
    assert "scaled-mean" not in found.help


def test_bw211_rows_added_as_a_mean_are_found_where_norms_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bowline.auditing.row_scan.NORM_ELEMENTS", 1 << 10)
    values = with_norms({}, rows=2048, width=320) + np.float32(0.4)
    values[9, :256] *= np.float32(0.1)  # short in the columns that are looked at, and not as a whole
    values[9, 256:] *= np.float32(2)
    values[8] = values.mean(axis=0)
    found = one(unused_gpt2(tmp_path, values), "BW211")
    assert "1 row with a norm far below all others" in found.message
    assert "(8)" in found.message


@pytest.mark.parametrize("width", [8, 16, 64, 576, 4096])
def test_bw211_is_not_said_of_fresh_tables(tmp_path: Path, width: int) -> None:
    for seed in range(3):
        values = table(512 if width > 64 else 8192, width, seed=seed) * np.float32(0.02)
        assert "BW211" not in codes(write(tmp_path, {WTE: values}, {**GPT2, "vocab_size": len(values)}))


@pytest.mark.parametrize(("noise", "code"), [(0.0, "BW205"), (1e-4, "BW208")])
def test_equal_rows_that_were_added_as_a_mean_are_said_to_be_short(tmp_path: Path, noise: float, code: str) -> None:
    values = table(1024, 64) + np.float32(0.3)
    values[1000:1010] = values[:1000].mean(axis=0) + np.float32(noise) * table(10, 64, seed=3)
    found = one(unused_gpt2(tmp_path, values), code)
    assert "(1000-1009)" in found.message
    assert ", far shorter than all others (norm 2.4 where the median is 8.3)" in found.message
    assert found.help.endswith('resize_vocab(new_rows="scaled-mean") adds rows of the usual norm')
    assert "BW211" not in codes(tmp_path)


def test_bw211_is_not_said_of_rows_that_another_finding_has(tmp_path: Path) -> None:
    values = with_norms({3: 0, 4: np.nan, 5: 0.4})
    values[900:903] = values[900] * np.float32(0.3)
    path = write(tmp_path, {WTE: values}, {**GPT2, "vocab_size": 1024, "pad_token_id": 5})
    assert codes(path) == ["BW204", "BW205", "BW206", "BW207"]


def test_bw211_a_mean_row_in_a_table_with_a_long_lower_tail(tmp_path: Path) -> None:
    lengths = np.random.default_rng(3).uniform(0.65, 1.35, size=(1024, 1)).astype(np.float32)
    values = table(1024, 64) * lengths
    values[1000] *= np.float32(0.05) / lengths[1000]
    assert "(1000)" in one(unused_gpt2(tmp_path, values), "BW211").message


def test_bw211_is_not_said_of_trained_tables(minilm: Path) -> None:
    assert "BW211" not in codes(minilm)


@pytest.mark.real
def test_bw211_is_not_said_of_smollm2(smollm2: Path) -> None:
    assert "BW211" not in codes(smollm2)


@pytest.mark.parametrize(("value", "code"), [(0.0, "BW206"), (np.nan, "BW207"), (1.5, "BW205")])
def test_the_same_rows_of_embedding_and_head_are_one_finding(tmp_path: Path, value: float, code: str) -> None:
    rows = {60: value, 61: value, 62: value}
    found = one(write(tmp_path, {EMBED: with_rows(rows), HEAD: with_rows(rows, seed=1)}, LLAMA), code)
    assert found.tensors == (EMBED, HEAD)
    assert found.message.startswith(f"{EMBED} and {HEAD} each have 3 rows ")
    assert found.severity is {"BW206": Severity.WARNING, "BW207": Severity.ERROR, "BW205": Severity.INFO}[code]


def test_different_rows_of_embedding_and_head_are_two_findings(tmp_path: Path) -> None:
    path = write(tmp_path, {EMBED: with_rows({62: 0}), HEAD: with_rows({62: 0, 63: 0}, seed=1)}, LLAMA)
    assert [found.tensors for found in findings(path) if found.code == "BW206"] == [(HEAD,), (EMBED,)]


def test_bw208_the_same_untrained_rows_of_embedding_and_head_are_one_finding(tmp_path: Path) -> None:
    values = with_unused(unused=range(7, 107))
    path = write(tmp_path, {EMBED: values, HEAD: values * np.float32(2)}, {**LLAMA, "vocab_size": len(values)})
    found = one(path, "BW208")
    assert found.message.startswith(f"{EMBED} and {HEAD} each have 100 rows (2.4%) that look untrained (7-106)")


def test_a_bert_whose_bias_is_a_vocabulary_tensor_has_nothing_to_find(tmp_path: Path) -> None:
    tensors = {BERT_EMBED: table(), "cls.predictions.bias": np.ones(64, np.float32)}
    assert codes(write(tmp_path, tensors, BERT)) == []
