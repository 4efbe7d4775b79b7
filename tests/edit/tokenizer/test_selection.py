"""Which tokens stay, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import Reason, StoredTokenizer, read_tokenizer, select_tokens, token_map, token_texts
from bowline.errors import UsageError
from tests.edit.tokenizer.small_tokenizers import BYTES, TRAINED, byte_fallback, byte_level, pruned, wordpiece


def tokenizer_of(content: str, tmp_path: Path) -> StoredTokenizer:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    return read_tokenizer(LocalDirectory(tmp_path))


@pytest.mark.parametrize("kind", TRAINED)
def test_ids_keep_their_order_and_every_reason_is_counted(kind: str) -> None:
    selection = pruned(TRAINED[kind](), ["the loop"]).selection
    assert (np.diff(selection.kept) > 0).all()
    assert selection.remap[selection.kept].tolist() == list(range(len(selection.kept)))
    assert (selection.remap >= 0).sum() == len(selection.kept) == sum(selection.counts.values())
    assert selection.counts[Reason.CORPUS] > 0
    assert selection.new_id(-1) == selection.new_id(10**6) == -1


def test_the_byte_alphabet_and_the_merge_paths_of_a_byte_level_tokenizer_stay() -> None:
    result = pruned(byte_level(), ["bowline"])
    counts = result.selection.counts
    assert counts[Reason.SPECIAL] == 1
    assert counts[Reason.BYTE_ALPHABET] + sum(len(result.tokenizer.texts[i]) == 1 for i in result.corpus.used) == 256
    assert counts[Reason.MERGE_PATH] > 0


def test_byte_pieces_stay_and_characters_go_where_text_can_fall_back() -> None:
    result = pruned(byte_fallback(), ["rope"])
    kept = {result.tokenizer.texts[old] for old in result.selection.kept.tolist()}
    assert kept.issuperset([*BYTES, "▁", "<unk>", "<s>"])
    assert "ü" in result.tokenizer.ids
    assert "ü" not in kept


def test_characters_stay_where_a_decoder_would_not_read_bytes() -> None:
    content = json.loads(byte_fallback())
    content["decoder"] = {"type": "Fuse"}
    result = pruned(json.dumps(content), ["rope"])
    assert "ü" in {result.tokenizer.texts[old] for old in result.selection.kept.tolist()}


def test_wordpiece_keeps_characters_at_both_places_of_a_word() -> None:
    result = pruned(wordpiece(), ["rope"])
    kept = {result.tokenizer.texts[old] for old in result.selection.kept.tolist()}
    singles = {text for text in result.tokenizer.ids if len(text.removeprefix("##")) == 1}
    assert singles <= kept


def test_the_lowest_score_stays_because_unknown_characters_are_scored_by_it() -> None:
    scores = {"<unk>": 0.0, "d": -15.0, "ec": -15.0, "de": -1.0, "dd": -30.0, "nor this": -20.0}
    model = tokenizers.models.Unigram(list(scores.items()), 0)
    result = pruned(tokenizers.Tokenizer(model).to_str(), ["dec"])
    assert result.difference is None
    assert result.after.encode("dec").tokens == ["d", "ec"]
    assert result.selection.counts[Reason.LOWEST_SCORE] == 1
    assert result.tokenizer.ids["nor this"] in result.selection.kept  # o has no piece of its own
    assert result.selection.counts[Reason.SPELLING] > 0


def test_what_is_tried_on_an_unknown_word_stays_so_that_it_stays_unknown() -> None:
    vocabulary = {text: number for number, text in enumerate(["[UNK]", "f", "##o", "foo", "##oZ", "of"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    result = pruned(backend.to_str(), ["f fooZ"])
    assert result.difference is None
    assert result.after.encode("f fooZ").tokens == ["f", "[UNK]"]
    assert result.selection.counts[Reason.UNKNOWN_WORD] == 1


def test_tokens_with_a_character_of_no_other_token_stay() -> None:
    vocabulary = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("bc", -2.0), ("ab", -3.0)]
    result = pruned(tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 0)).to_str(), ["a"])
    assert result.after.encode("abc").tokens == ["a", "bc"]
    assert result.after.token_to_id("bc") is not None


def test_a_pattern_is_found_in_the_decoded_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level(["größer größer größer größer"] * 3, 300), tmp_path)
    selection = select_tokens(tokenizer, pattern="^größer$")
    assert selection.counts[Reason.PATTERN] == 1
    assert "gr\u00c3\u00b6\u00c3\u0141er" in {tokenizer.texts[old] for old in selection.kept.tolist()}
    assert "größer" in token_texts(tokenizer).values()


def test_an_id_that_a_config_names_stays_even_if_no_token_has_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level(), tmp_path)
    ordinary = tokenizer.size - 1
    assert len(tokenizer.texts[ordinary]) > 1
    selection = select_tokens(tokenizer, listed=[0], named=[ordinary, tokenizer.size + 3])
    assert selection.new_id(tokenizer.size + 3) == len(selection.kept) - 1
    assert selection.counts[Reason.NAMED] == 2
    assert len(selection.remap) == tokenizer.size + 4


def test_the_token_map_is_json_from_old_to_new_ids() -> None:
    selection = pruned(byte_level(), ["rope"]).selection
    found = json.loads(token_map(selection))
    assert {int(old): new for old, new in found.items()} == {
        old: new for new, old in enumerate(selection.kept.tolist())
    }


def test_asking_for_nothing_or_with_a_broken_pattern_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level(), tmp_path)
    with pytest.raises(UsageError, match="nothing says which tokens to keep"):
        select_tokens(tokenizer)
    with pytest.raises(UsageError, match="not a regular expression"):
        select_tokens(tokenizer, pattern="(")
