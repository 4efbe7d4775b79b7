"""New tokens stand for their text, and all others keep their ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import added_tokens, pieces, read_tokenizer
from bowline.errors import FormatError, UsageError
from tests.edit.tokenizer.small_tokenizers import TRAINED, byte_level


@pytest.mark.parametrize("kind", TRAINED)
def test_new_tokens_are_found_in_text_in_every_kind(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TRAINED[kind](), encoding="utf-8")
    files = LocalDirectory(tmp_path)
    tokenizer = read_tokenizer(files)
    addition = added_tokens(files, tokenizer, ["<Tool>", "größer als"])
    assert addition.ids == {"<Tool>": tokenizer.size, "größer als": tokenizer.size + 1}
    backend = tokenizers.Tokenizer.from_str(addition.files["tokenizer.json"].decode())
    backend.no_truncation()
    assert set(addition.ids.values()) <= set(backend.encode("the rope<Tool>größer als a rope").ids)
    old, new = json.loads(tokenizer.data), json.loads(addition.files["tokenizer.json"])
    assert new["model"] == old["model"]
    assert new["added_tokens"][: len(old["added_tokens"])] == old["added_tokens"]
    (tmp_path / "tokenizer.json").write_bytes(addition.files["tokenizer.json"])
    assert read_tokenizer(LocalDirectory(tmp_path)).size == tokenizer.size + 2


def test_the_other_files_get_the_tokens_too(tmp_path: Path) -> None:
    for name, content in {
        "tokenizer.json": byte_level(),
        "tokenizer_config.json": '{"added_tokens_decoder": {"0": {"content": "<|end|>"}}}',
        "added_tokens.json": '{"<|end|>": 0}\n',
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    files = LocalDirectory(tmp_path)
    tokenizer = read_tokenizer(files)
    addition = added_tokens(files, tokenizer, ["<new>"])
    decoder = json.loads(addition.files["tokenizer_config.json"])["added_tokens_decoder"]
    assert list(decoder) == ["0", str(tokenizer.size)]
    assert decoder[str(tokenizer.size)]["content"] == "<new>"
    assert addition.files["added_tokens.json"] == f'{{"<|end|>": 0, "<new>": {tokenizer.size}}}\n'.encode()


def test_a_text_is_split_by_the_tokenizer_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    tokenizer = read_tokenizer(LocalDirectory(tmp_path))
    backend = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    assert [found.tolist() for found in pieces(tokenizer, ["bowline", "a"])] == [
        backend.encode("bowline").ids,
        backend.encode("a").ids,
    ]


def test_texts_that_cannot_be_new_tokens_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    files = LocalDirectory(tmp_path)
    tokenizer = read_tokenizer(files)
    for texts, message in (
        (["<a>", "<a>"], "the new token '<a>' occurs twice"),
        (["<|end|>"], "is a token already, with the id 0"),
        ([""], "a new token is empty"),
    ):
        with pytest.raises(UsageError, match=message):
            added_tokens(files, tokenizer, texts)


def test_ids_with_holes_are_refused_because_the_library_would_fill_them(tmp_path: Path) -> None:
    content = json.loads(byte_level())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    content["model"]["vocab"][last] += 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    files = LocalDirectory(tmp_path)
    with pytest.raises(FormatError, match="but tokenizers gives it"):
        added_tokens(files, read_tokenizer(files), ["<new>"])
