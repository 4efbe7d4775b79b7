"""A corpus is counted file by file, in documents of bounded size; a file that is no text is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bowline.auditing.progress import Progress
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import StoredTokenizer, count_tokens, read_tokenizer, token_counts
from bowline.errors import UsageError
from tests.edit.tokenizer.small_tokenizers import byte_level, pruned, wordpiece


@pytest.fixture
def tokenizer(tmp_path: Path) -> StoredTokenizer:
    (tmp_path / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    return read_tokenizer(LocalDirectory(tmp_path))


def test_counts_are_those_of_the_library(tokenizer: StoredTokenizer, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"the rope\r\n")
    second.write_bytes("größer".encode())
    count = count_tokens(tokenizer, [first, second])
    backend = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    ids = backend.encode("the rope\r\n").ids + backend.encode("größer").ids
    assert np.array_equal(count.counts, np.bincount(ids, minlength=tokenizer.size))
    assert (count.files, count.documents, count.tokens) == (2, 2, len(ids))
    assert count.covered(count.used) == 1
    assert count.covered(count.used[:0]) == 0


@pytest.mark.parametrize("text", ["line\n" * 40, "größer" * 40, "ab\n" + "🪢" * 50, "\n" * 64])
def test_a_long_file_is_cut_after_lines_or_characters(
    text: str, tokenizer: StoredTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "LONGEST_DOCUMENT", 32)
    monkeypatch.setattr(token_counts, "BATCH_BYTES", 70)
    path = tmp_path / "long"
    path.write_bytes(text.encode())
    progress = _Seen()
    documents = [document for batch in token_counts.batches([path], progress) for document in batch]
    assert "".join(document.text for document in documents) == text
    assert all(document.nbytes <= 32 for document in documents)
    assert [document.start for document in documents] == np.cumsum(
        [0, *(one.nbytes for one in documents[:-1])]
    ).tolist()
    assert progress.expected == progress.advanced == len(text.encode())
    assert documents[1].place == f"{path}, from byte {documents[1].start}"
    if "\nl" in text:
        assert all(document.text.endswith("\n") for document in documents)
    assert count_tokens(tokenizer, [path]).documents == len(documents)


def test_files_that_are_no_text_are_named(tokenizer: StoredTokenizer, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_bytes(b"")
    binary.write_bytes(b"ab\xff")
    for paths, message in (
        ([], "the corpus has no files"),
        ([tmp_path / "absent"], "absent: no such file, expected a text file"),
        ([tmp_path], "a directory, expected a text file"),
        ([empty], "empty: the file is empty"),
        ([binary], "binary: byte 0xff at 2 is not UTF-8"),
    ):
        with pytest.raises(UsageError, match=message):
            count_tokens(tokenizer, paths)


def test_truncation_and_padding_do_not_hide_tokens(tmp_path: Path) -> None:
    result = pruned(wordpiece(), ["the bowline makes a loop at the end of a rope and does not slip"])
    assert result.corpus.tokens > 8
    assert result.corpus.counts[0] == 0


class _Seen(Progress):
    def __init__(self) -> None:
        self.expected = self.advanced = 0

    def expect(self, count: int) -> None:
        self.expected += count

    def advance(self, count: int) -> None:
        self.advanced += count
