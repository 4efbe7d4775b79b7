"""Documents to rows of ids on the disk: each document whole, in one of the two rows, and no half-made file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.train.text import packed_tokens as room
from bowline.train.text.corpus import Corpus, CorpusSurvey, find_text
from bowline.train.text.packed_tokens import held_out_documents, open_packed, pack, training_documents
from bowline.train.text.tokenizer_training import TextTokenizer, train_tokenizer
from tests.train.texts import library


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return find_text(library(tmp_path_factory.mktemp("text") / "library"))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> TextTokenizer:
    return train_tokenizer("gpt2", corpus, 400)


def documents_of(row: np.ndarray, tokenizer: TextTokenizer) -> list[str]:
    """Back to text, cut at the separators."""
    ends = np.flatnonzero(row == tokenizer.separator)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.backend.decode(row[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def test_each_document_is_whole_in_one_of_the_rows(corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    made = pack(corpus, tokenizer, tmp_path / "tokens", share=0.2)
    train, held_out = documents_of(made.train, tokenizer), documents_of(made.held_out, tokenizer)
    assert sorted(train + held_out) == sorted(corpus)
    assert not set(train) & set(held_out)
    assert (made.documents, made.held_out_documents) == (len(train), len(held_out))
    assert train == list(training_documents(corpus, held_out_documents(corpus.survey, 0.2)))
    assert 0 < sum(map(len, held_out)) <= 0.2 * corpus.survey.characters


def test_rows_are_mapped_and_as_narrow_as_the_vocabulary_lets_them_be(
    corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = pack(corpus, tokenizer, tmp_path / "narrow")
    assert isinstance(narrow.train, np.memmap)
    assert narrow.train.dtype == np.uint16
    monkeypatch.setattr(TextTokenizer, "__len__", lambda self: 2**16 + 1)
    wide = pack(corpus, tokenizer, tmp_path / "wide")
    assert wide.train.dtype == np.uint32
    assert np.array_equal(narrow.train, wide.train)


def survey_of(texts: list[str]) -> CorpusSurvey:
    return CorpusSurvey(
        sizes=tuple(map(len, texts)),
        hashes=tuple(f"{abs(hash(text)):x}" for text in texts),
        files=len(texts),
        skipped_bytes=0,
        skipped_files=0,
    )


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=2, max_size=30), st.floats(0.01, 0.9), st.randoms())
def test_copies_are_on_one_side_and_the_order_of_files_does_not_matter(
    texts: list[str], share: float, random: Any
) -> None:
    if len(set(texts)) < 2:
        return
    held_out = {texts[at] for at in held_out_documents(survey_of(texts), share)}
    assert held_out
    assert set(texts) - held_out
    assert not held_out & {texts[at] for at in set(range(len(texts))) - held_out_documents(survey_of(texts), share)}
    other = random.sample(texts, len(texts))
    assert {other[at] for at in held_out_documents(survey_of(other), share)} == held_out or len(held_out) == 1


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a short text\n")
    (tmp_path / "b.txt").write_text("a short text\n")
    with pytest.raises(UsageError, match="26 characters but only one distinct document, so nothing can be held out"):
        held_out_documents(find_text(tmp_path).survey, 0.1)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), "half"])
def test_a_share_that_is_none_is_an_error(share: float, corpus: Corpus) -> None:
    with pytest.raises(UsageError, match=r"share=.*: expected a number above 0 and below 1"):
        held_out_documents(corpus.survey, share)


def test_what_is_there_is_used_and_what_differs_is_made_anew(
    corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tokens"
    first = pack(corpus, tokenizer, place, share=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(room, "_write", lambda *_: pytest.fail("made again"))
        again = pack(corpus, tokenizer, place, share=0.2)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train, first.train)
    other = pack(corpus, tokenizer, place, share=0.4)
    assert other.fingerprint != first.fingerprint
    assert len(other.held_out) > len(first.held_out)


def test_a_row_that_is_cut_short_is_made_anew(corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    place = tmp_path / "tokens"
    count = len(pack(corpus, tokenizer, place).train)
    (place / "train.bin").write_bytes((place / "train.bin").read_bytes()[:-2])
    assert open_packed(place) is None
    assert len(pack(corpus, tokenizer, place).train) == count


def test_a_run_that_fails_half_way_leaves_what_was_there(
    corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    place = tmp_path / "tokens"
    pack(corpus, tokenizer, place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def stop(count: int) -> None:
        raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError):
        pack(corpus, tokenizer, place, share=0.4, progress=stop)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_directory_of_something_else_is_refused_and_untouched(
    corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="expected packed tokens or an empty directory, got other files"):
        pack(corpus, tokenizer, tmp_path)
    (tmp_path / "packed.json").write_text(json.dumps({"mine": 1}))
    with pytest.raises(UsageError, match="expected packed tokens or an empty directory"):
        pack(corpus, tokenizer, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_unigram_counts_the_text_to_train_on(corpus: Corpus, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    made = pack(corpus, tokenizer, tmp_path / "tokens")
    counts = Counter(made.train.tolist())
    expected = np.array([counts[at] + 1 for at in range(500)]) / (len(made.train) + 500)
    np.testing.assert_allclose(made.unigram(500), expected, rtol=1e-12)
