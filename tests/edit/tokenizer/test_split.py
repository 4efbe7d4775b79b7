"""A pruned tokenizer splits its corpus as before, and any other text still decodes to itself."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.edit.tokenizer.small_tokenizers import DECODABLE, DRAWN, TRAINED, TRAINING, Pruned, corpora, pruned, texts


@pytest.mark.parametrize("kind", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_the_corpus_and_every_text_of_kept_tokens_split_to_the_mapped_ids(kind: str, data: st.DataObject) -> None:
    result = pruned(data.draw(DRAWN[kind]), data.draw(corpora))
    assert result.difference is None
    for text in data.draw(corpora):
        ids = result.before.encode(text).ids
        mapped = [result.selection.new_id(number) for number in ids]
        if -1 not in mapped and result.before.token_to_id("[UNK]") not in ids:
            assert result.after.encode(text).ids == mapped, text


@pytest.mark.parametrize("kind", DECODABLE)
@settings(max_examples=40)
@given(data=st.data())
def test_any_text_still_decodes_to_itself(kind: str, data: st.DataObject) -> None:
    result = pruned(data.draw(DECODABLE[kind]), data.draw(corpora))
    _check_round_trip(result, data.draw(texts))


@pytest.mark.parametrize("kind", TRAINED)
@settings(max_examples=20)
@given(kept=st.lists(st.sampled_from(TRAINING), min_size=1, max_size=2), other=st.text(min_size=1))
def test_trained_tokenizers_are_pruned_exactly(kind: str, kept: list[str], other: str) -> None:
    result = pruned(_trained(kind), kept)
    assert result.difference is None
    assert len(result.selection.kept) < result.tokenizer.size
    if kind != "WordLevel":  # a word that goes is unknown
        for text in (other, *TRAINING):
            _check_round_trip(result, text)


def _check_round_trip(result: Pruned, text: str) -> None:
    def back(backend: tokenizers.Tokenizer) -> str:
        backend.no_truncation()  # the text can have more tokens than before
        found: str = backend.decode(backend.encode(text, add_special_tokens=False).ids)
        return found

    if back(result.before) == text:
        assert back(result.after) == text


_made: dict[str, str] = {}


def _trained(kind: str) -> str:
    if kind not in _made:
        _made[kind] = TRAINED[kind]()
    return _made[kind]
