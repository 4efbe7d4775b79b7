"""`tokenizer.json` is read strictly, and a checkpoint without one is told how to get it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import Kind, StoredTokenizer, count_tokens, read_tokenizer, rewritten_files, select_tokens
from bowline.errors import BowlineError, FormatError, UsageError
from tests.edit.tokenizer.small_tokenizers import TRAINED, byte_level, unigram


def read(content: Any, place: Path) -> StoredTokenizer:
    (place / "tokenizer.json").write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )
    return read_tokenizer(LocalDirectory(place))


@pytest.mark.parametrize("kind", TRAINED)
def test_kinds_are_told_apart_also_without_the_type(kind: str, tmp_path: Path) -> None:
    content = json.loads(TRAINED[kind]())
    assert read(content, tmp_path).kind == Kind(kind)
    del content["model"]["type"]
    assert read(content, tmp_path).kind == Kind(kind)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt", "vocab.json"])
def test_a_slow_tokenizer_alone_is_told_how_to_get_a_tokenizer_json(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=rf"the tokenizer is {name} without a tokenizer\.json.*save_pretrained"):
        read_tokenizer(LocalDirectory(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=r"there is no tokenizer\.json in"):
        read_tokenizer(LocalDirectory(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab": 3}, "model.vocab: 3, expected an object"),
        ({"vocab": {"a": -1}}, "model.vocab: -1, expected a token id"),
        ({"vocab": {"a": 2**40}}, "expected a token id from 0 to"),
        ({"vocab": {"a": True}}, "model.vocab: true, expected a token id"),
        ({"vocab": {"a": 0, "b": 0}}, "the tokens 'a' and 'b' both have the id 0"),
        ({"vocab": {"a": 0}, "merges": ["a"]}, r"model.merges\[0\]: 'a', expected two tokens"),
        ({"vocab": {"a": 0}, "merges": [["a", 3]]}, "expected two tokens"),
        ({"vocab": {"a": 0}, "merges": ["a b"]}, "'b' is not in model.vocab"),
        ({"vocab": {"a": 0}, "merges": None}, "model.merges: null, expected a list"),
        ({"type": "Unigram", "vocab": [["a"]]}, "expected a token and its score"),
        ({"type": "Unigram", "vocab": [["a", "b"]]}, "expected a token and its score"),
        ({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 1}, "unk_id: 1, expected less than the 1 tokens"),
        ({"type": "Other", "vocab": {}}, "a model of type 'Other'"),
        (None, "model: null, expected an object"),
    ],
)
def test_a_malformed_model_is_refused(model: Any, message: str, tmp_path: Path) -> None:
    whole = None if model is None else {"type": "BPE", "merges": [], **model}
    with pytest.raises((FormatError, UsageError), match=message):
        read({"model": whole}, tmp_path)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"added_tokens": {}}, "added_tokens: an object of 0, expected a list"),
        ({"added_tokens": [{"id": 1}]}, "expected an object with the token's content"),
        ({"added_tokens": [{"content": "x", "id": "1"}]}, "'x': '1', expected a token id"),
        ({"added_tokens": [{"content": "<unk>", "id": 99}]}, "'<unk>' has the id 99, in model.vocab it has 1"),
        ({"added_tokens": [{"content": "x", "id": 1}]}, "both have the id 1"),
        ({"post_processor": {"type": "BertProcessing", "sep": 3}}, "post_processor.sep: 3, expected a token and its"),
        ({"post_processor": {"type": "TemplateProcessing", "special_tokens": {"a": 1}}}, "a list of ids"),
        ({"padding": {"pad_id": -3}}, "padding.pad_id: -3, expected a token id"),
    ],
)
def test_malformed_parts_are_refused(part: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read({**json.loads(unigram()), **part}, tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["a", "BPE", "Unigram", "Sequence", "ids"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "vocab", "merges", "content", "id", "ids", "pad_id"]), inner)
    ),
    max_leaves=8,
)


models = st.fixed_dictionaries(
    {"type": st.sampled_from([*Kind, "BPE"]), "vocab": st.sampled_from([{"a": 0, "b": 1, "ab": 3}, [["a", -1.0]]])},
    optional={
        "merges": st.sampled_from([[], ["a b"], [["a", "b"], ["b", "a"]]]),
        **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix", "unk_token"), values),
        **dict.fromkeys(("byte_fallback", "ignore_merges", "unk_id", "dropout"), values),
    },
)


@settings(max_examples=150)
@given(
    model=models | values,
    parts=st.dictionaries(st.sampled_from(["added_tokens", "post_processor", "padding", "decoder"]), values),
    others=st.dictionaries(
        st.sampled_from(["added_tokens_decoder", "auto_map", "pad_token_id", "pad_token", "chat_template"]), values
    ),
)
def test_any_json_is_pruned_or_refused_in_words(
    model: Any, parts: dict[str, Any], others: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.getbasetemp()
    (place / "tokenizer_config.json").write_text(json.dumps(others), encoding="utf-8")
    with suppress(BowlineError):
        tokenizer = read({"model": model, **parts}, place)
        selection = select_tokens(tokenizer, listed=[0], pattern="b")
        rewritten_files(LocalDirectory(place), tokenizer, selection)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read(byte_level(), tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs tokenizers, which is not installed.*\[edit\]"):
        count_tokens(tokenizer, [tmp_path / "tokenizer.json"])


def test_a_file_that_the_library_refuses_is_a_format_error(tmp_path: Path) -> None:
    content = json.loads(byte_level())
    content["normalizer"] = {"type": "Absent"}
    tokenizer = read(content, tmp_path)
    with pytest.raises(FormatError, match=r"tokenizers 0\.\S+ refuses it"):
        count_tokens(tokenizer, [tmp_path / "tokenizer.json"])
