"""The closure holds what BPE applies, and little else."""

from __future__ import annotations

import time

import pytest

from bowline.edit.tokenizer import by_merges, by_scores
from bowline.errors import FormatError

IDS = {text: number for number, text in enumerate(["a", "b", "c", "ab", "bc", "abc", "cab", "abcab"])}


def test_only_the_merges_that_are_applied_stay_among_those_that_spell_a_token() -> None:
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    closure = by_merges(IDS, merges, [IDS["abc"]])
    assert closure.merges.tolist() == [0, 3]
    assert closure.tokens == {IDS[text] for text in ("a", "b", "c", "bc", "abc")}


def test_a_token_that_its_characters_do_not_give_keeps_every_way_to_it() -> None:
    merges = [("b", "c"), ("ab", "c"), ("a", "b"), ("c", "ab"), ("ab", "cab"), ("abc", "ab")]
    closure = by_merges(IDS, merges, [IDS["abcab"]])  # a b c a b: bc first, so neither ab nor abc arises at the start
    assert {4, 5} <= set(closure.merges.tolist())


def test_a_pair_that_occurs_twice_has_its_last_rank_and_stays_twice() -> None:
    merges = [("a", "b"), ("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    closure = by_merges(IDS, merges, [IDS["abc"]])
    assert closure.merges.tolist() == [1, 4]
    assert by_merges(IDS, merges, [IDS["ab"]]).merges.tolist() == [0, 2]


def test_the_left_one_of_two_equal_pairs_merges_first() -> None:
    ids = {text: number for number, text in enumerate(["a", "aa", "aaa", "aaaa"])}
    merges = [("a", "a"), ("aa", "a"), ("a", "aa"), ("aa", "aa")]
    assert by_merges(ids, merges, [ids["aaa"]]).merges.tolist() == [0, 1]


def test_marks_of_a_words_inside_and_end_are_read_as_bpe_reads_them() -> None:
    texts = ["a", "##b", "##c</w>", "a##", "ab", "##bc</w>", "abc</w>"]
    ids = {text: number for number, text in enumerate(texts)}
    merges = [("##b", "##c</w>"), ("a", "##b"), ("ab", "##c</w>"), ("a", "##bc</w>")]
    closure = by_merges(ids, merges, [ids["abc</w>"]], prefix="##", suffix="</w>")
    assert closure.merges.tolist() == [0, 3]


def test_a_merge_of_unknown_tokens_is_refused() -> None:
    with pytest.raises(FormatError, match="'ba', which is not a token"):
        by_merges(IDS, [("b", "a")], [0])


def test_scores_decide_which_neighbours_merge_first() -> None:
    scores = {IDS["ab"]: -2.0, IDS["bc"]: -1.0, IDS["abc"]: -3.0}
    assert by_scores(IDS, scores, [IDS["abc"]]) == {IDS["abc"], IDS["bc"]}
    scores[IDS["ab"]] = -0.5
    assert by_scores(IDS, scores, [IDS["abc"]]) == {IDS["abc"], IDS["ab"]}


def test_a_long_token_takes_little_more_than_linear_time() -> None:
    longest = 1 << 14
    ids = {"a" * length: length for length in range(1, longest + 1) if length & (length - 1) == 0}
    merges = [(text, text) for text in ids if len(text) < longest]
    ids["a" * (longest - 1)] = longest - 1
    others = [("a", "a" * (longest - 1))]  # a second way, so that the token's characters are merged
    start = time.perf_counter()
    assert by_merges(ids, merges + others, [longest]).merges.tolist() == list(range(len(merges)))
    assert len(by_scores(ids, dict.fromkeys(ids.values(), 0.0), [longest])) == len(merges)
    assert time.perf_counter() - start < 5
