"""The ids that a tokenizer can produce, read from any of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bowline.auditing.special_ids import special_ids
from bowline.auditing.tokenizer_files import TokenizerFacts, read_tokenizer
from bowline.checkpoint import open_checkpoint
from tests.checkpoint.sentencepiece_files import model
from tests.checkpoints import tied_gpt2


def read(path: Path, **files: Any) -> TokenizerFacts | None:
    tied_gpt2(path)
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with open_checkpoint(path) as checkpoint:
        return read_tokenizer(checkpoint)


def found(path: Path, **files: Any) -> TokenizerFacts:
    tokenizer = read(path, **files)
    assert tokenizer is not None
    return tokenizer


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_a_vocabulary_of_pieces_and_ids(tmp_path: Path) -> None:
    tokenizer = found(tmp_path, tokenizer={"model": {"type": "BPE", "vocab": {"a": 0, "b": 7}}})
    assert (tokenizer.ids, tokenizer.largest_id, tokenizer.largest_token, tokenizer.size) == (
        {"a": 0, "b": 7},
        7,
        "b",
        8,
    )
    assert tokenizer.files == ("tokenizer.json",)


def test_a_unigram_vocabulary_counts_its_pieces(tmp_path: Path) -> None:
    tokenizer = found(tmp_path, tokenizer={"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}})
    assert tokenizer.ids == {"<unk>": 0, "a": 1}


def test_added_tokens_count_wherever_they_are_written(tmp_path: Path) -> None:
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 5, "content": "<x>"}]}
    tokenizer = found(tmp_path, tokenizer=content, added_tokens={"<y>": 9})
    assert (tokenizer.ids, tokenizer.size) == ({"a": 0, "<x>": 5, "<y>": 9}, 10)
    assert tokenizer.files == ("tokenizer.json", "added_tokens.json")


def test_the_old_vocabulary_is_read_where_there_is_no_newer_one(tmp_path: Path) -> None:
    assert found(tmp_path, vocab={"a": 3}).ids == {"a": 3}
    assert found(tmp_path, vocab={"a": 3}, tokenizer={"model": {"vocab": {"b": 1}}}).ids == {"b": 1}


def test_special_tokens_are_named_by_their_part(tmp_path: Path) -> None:
    named = {
        "pad_token": "[PAD]",
        "eos_token": {"content": "</s>", "lstrip": False},
        "additional_special_tokens": ["x"],
    }
    assert found(tmp_path, special_tokens_map=named).special == {"pad_token": "[PAD]", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "content",
    [
        {}, {"model": None}, {"model": []}, {"model": {"vocab": None}}, {"model": {"vocab": [[], [1], "a", ["b"]]}},
        {"model": {"vocab": {"a": "1", "b": 1.5, "c": True, "d": -4, "e": None}}}, {"added_tokens": {"a": 1}},
        {"added_tokens": [None, 1, {"id": "x", "content": "a"}, {"id": 3}, {"content": "b"}]},
    ],
)  # fmt: skip
def test_what_is_no_id_is_not_counted(tmp_path: Path, content: Any) -> None:
    tokenizer = found(tmp_path, tokenizer=content)
    assert set(tokenizer.ids) <= {"b"}
    assert tokenizer.problems == {}
    assert tokenizer.size == (4 if tokenizer.ids else 0)


def test_a_tokenizer_without_ids_has_size_zero(tmp_path: Path) -> None:
    tokenizer = found(tmp_path, vocab={})
    assert (tokenizer.size, tokenizer.largest_id, tokenizer.largest_token) == (0, None, None)


def test_a_malformed_file_is_a_problem_and_the_next_one_is_read(tmp_path: Path) -> None:
    tokenizer = found(tmp_path, tokenizer="{", vocab={"a": 1}, added_tokens="[")
    assert tokenizer.ids == {"a": 1}
    assert list(tokenizer.problems) == ["tokenizer.json", "added_tokens.json"]
    assert all(problem.startswith(file) for file, problem in tokenizer.problems.items())


def test_nothing_but_malformed_files_is_a_tokenizer_with_problems(tmp_path: Path) -> None:
    tokenizer = found(tmp_path, tokenizer="")
    assert (tokenizer.files, tokenizer.size, list(tokenizer.problems)) == ((), 0, ["tokenizer.json"])


# --- tokenizer.model and vocab.txt -----------------------------------------------------------------------------------

PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("a", -1.0, 1), ("b", -2.0, 1), ("c", -3.0, 1)]
IDS = {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "c": 4}


def beside(path: Path, binary: dict[str, bytes], **files: Any) -> TokenizerFacts:
    for name, data in binary.items():
        (path / name).write_bytes(data)
    return found(path, **files)


def test_pieces_are_the_ids_where_there_is_no_json(tmp_path: Path) -> None:
    tokenizer = beside(tmp_path, {"tokenizer.model": model(PIECES)})
    assert (tokenizer.ids, tokenizer.files, tokenizer.size) == (IDS, ("tokenizer.model",), 5)


def test_tokens_that_the_settings_add_to_pieces_count(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {"9": {"content": "<x>"}, "-1": {"content": "y"}, "a": {"content": "z"}}}
    tokenizer = beside(tmp_path, {"tokenizer.model": model(PIECES)}, tokenizer_config=settings)
    assert (tokenizer.size, tokenizer.largest_token, set(tokenizer.added)) == (10, "<x>", {9})


def test_lines_are_the_ids_where_there_is_no_json(tmp_path: Path) -> None:
    tokenizer = beside(tmp_path, {"vocab.txt": "[PAD]\r\né\n\u2028\n\nlast".encode()})
    assert (tokenizer.ids, tokenizer.files) == ({"[PAD]": 0, "é": 1, "\u2028": 2, "": 3, "last": 4}, ("vocab.txt",))
    assert beside(tmp_path, {"vocab.txt": b"a\nb\n"}).size == 2


def test_a_fairseq_dictionary_and_a_file_of_tiktoken_hold_no_ids(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    (tmp_path / "vocab.txt").write_text("the 9000\nof 8000\n")
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "data"),
    [("tokenizer.model", b"version https://git-lfs"), ("vocab.txt", b"a\n\xff\n"), ("tokenizer.model", b"")],
)
def test_a_vocabulary_that_cannot_be_read_is_a_problem(tmp_path: Path, name: str, data: bytes) -> None:
    tokenizer = beside(tmp_path, {name: data}, vocab={"a": 1})
    assert (list(tokenizer.problems), tokenizer.ids) == ([name], {"a": 1})


def test_two_files_of_one_vocabulary_do_not_differ(tmp_path: Path) -> None:
    json_file = {"model": {"vocab": IDS}, "added_tokens": [{"id": 5, "content": "<x>"}, {"id": 1, "content": "<s>"}]}
    lines = "\n".join(IDS).encode()
    tokenizer = beside(tmp_path, {"tokenizer.model": model(PIECES), "vocab.txt": lines}, tokenizer=json_file)
    assert (tokenizer.differences, tokenizer.files) == ((), ("tokenizer.json",))


def test_renamed_pieces_that_are_not_normal_do_not_differ(tmp_path: Path) -> None:
    pieces = [*PIECES, ("<0x09>", 0.0, 6), ("[UNUSED_1]", 0.0, 4)]
    json_file = {"model": {"vocab": {**IDS, "\t": 5, "<|im_start|>": 6}}}
    assert beside(tmp_path, {"tokenizer.model": model(pieces)}, tokenizer=json_file).differences == ()


# --- the ids that a config states -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"pad_token_id": 0, "hidden_size": 3, "token_id": 4}, {"pad_token_id": 0}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id[0]": 1, "eos_token_id[1]": 2}),
        ({"eos_token_id": [1, None, "2", True, 1.0]}, {"eos_token_id[0]": 1}),
        ({"decoder_start_token_id": None, "bos_token_id": "1", "sep_token_id": True, "x_token_id": 1.0}, {}),
        ({"text_config": {"pad_token_id": 3}}, {"text_config.pad_token_id": 3}),
        ({"decoder": {"text_config": {"pad_token_id": 3}}}, {"decoder.text_config.pad_token_id": 3}),
        ({"vision_config": {"pad_token_id": 3}}, {}),
        ({"text_config": [{"pad_token_id": 3}]}, {}),
        ({"image_token_id": 9}, {"image_token_id": 9}),
    ],
)
def test_special_ids_are_whole_numbers_at_levels_that_speak_of_text(config: Any, expected: dict[str, int]) -> None:
    assert special_ids(config) == expected
