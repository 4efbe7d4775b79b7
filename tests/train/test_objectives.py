"""Batches as their papers have them, each a function of seed, step and number alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.train.text.objectives import CausalBatches, MaskedBatches, SpanBatches, Windows, span_lengths
from bowline.train.text.objectives.spans import span_mask
from bowline.train.text.objectives.windows import permuted, random_for

VOCAB = 400
TEXT = np.random.default_rng(0).integers(5, VOCAB, 20_000).astype(np.uint16)
HELD_OUT = np.random.default_rng(1).integers(5, VOCAB, 2_000).astype(np.uint16)
SENTINELS = range(VOCAB + 99, VOCAB - 1, -1)
OPTIONS: dict[str, Any] = {"length": 32, "batch_size": 4}


def causal(**options: Any) -> CausalBatches:
    return CausalBatches(TEXT, HELD_OUT, **{**OPTIONS, **options})


def masked(text: npt.NDArray[Any] = TEXT, **options: Any) -> MaskedBatches:
    ids = {"begin": 2, "separator": 3, "mask": 4, "special": {0, 1}, "vocab_size": VOCAB}
    return MaskedBatches(text, HELD_OUT, **{**ids, **OPTIONS, **options})


def spans(**options: Any) -> SpanBatches:
    return SpanBatches(TEXT, HELD_OUT, **{"sentinels": SENTINELS, "eos": 1, **OPTIONS, **options})


MAKERS = (causal, masked, spans)


# --- the order --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 2**63))
def test_a_permutation_takes_each_place_once(size: int, seed: int) -> None:
    assert sorted(permuted(at, size, seed) for at in range(size)) == list(range(size))


def test_permutations_of_two_seeds_have_no_more_in_common_than_chance() -> None:
    orders = [np.array([permuted(at, 1000, seed) for at in range(1000)]) for seed in range(4)]
    for at, one in enumerate(orders):
        assert (one == np.arange(1000)).sum() < 8  # one is expected
        assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.12  # 1/sqrt(1000) is its standard deviation
        assert all((one == other).sum() < 8 for other in orders[:at])


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 9))
def test_an_epoch_has_each_window_once_side_by_side(length: int, more: int, seed: int) -> None:
    windows = Windows(np.arange(length + more), length, seed=seed)
    for epoch in (0, 1, 5):
        rows = [windows[epoch * len(windows) + at] for at in range(len(windows))]
        assert all(np.array_equal(row, np.arange(row[0], row[0] + length)) for row in rows)
        starts = sorted(int(row[0]) for row in rows)
        assert np.diff(starts).tolist() == [length] * (len(windows) - 1)
        left = length + more - length * len(windows)
        assert left < 2 * length or len(windows) == 1


def test_epochs_differ_in_their_order_and_in_where_windows_begin() -> None:
    windows = Windows(np.arange(1000), 10, seed=3)
    epochs = [[int(windows[epoch * len(windows) + at][0]) for at in range(len(windows))] for epoch in range(8)]
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert len({epoch[0] % 10 for epoch in epochs}) > 2


@pytest.mark.parametrize("make", MAKERS)
def test_a_batch_is_a_function_of_seed_step_and_number(make: Any) -> None:
    first, again = make(seed=5, accumulation=2), make(seed=5, accumulation=2)
    forwards = [first.at(step, micro) for step in range(3) for micro in range(2)]
    backwards = [again.at(step, micro) for step in (2, 1, 0) for micro in (1, 0)][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    distinct = {batch["input_ids"].numpy().tobytes() for batch in forwards}
    assert len(distinct) == 6
    assert not torch.equal(make(seed=6, accumulation=2).at(0)["input_ids"], forwards[0]["input_ids"])


@pytest.mark.parametrize("make", MAKERS)
def test_the_batches_of_a_step_are_those_of_a_larger_batch(make: Any) -> None:
    whole = Windows(TEXT, make().windows.length, seed=0).rows(3, 0, 8, 1)
    parts = [make(accumulation=2).windows.rows(3, micro, 4, 2) for micro in range(2)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_held_out_is_the_same_each_time_and_for_every_seed(make: Any) -> None:
    one, other = make(seed=1), make(seed=2)
    for a, b, c in zip(one.held_out(), one.held_out(), other.held_out(), strict=True):
        for name in a:
            assert torch.equal(a[name], b[name])
            assert torch.equal(a[name], c[name])


def test_what_is_held_out_is_read_once_in_whole_windows() -> None:
    rows = torch.cat([batch["input_ids"] for batch in causal().held_out()])
    assert np.array_equal(rows.flatten().numpy(), HELD_OUT[: rows.numel()])
    assert len(HELD_OUT) - rows.numel() < 32


def test_an_evaluation_of_a_long_text_reads_windows_from_all_of_it() -> None:
    rows = torch.cat([batch["input_ids"] for batch in causal(held_out_tokens=320).held_out()])
    assert rows.shape == (10, 32)
    windows = np.lib.stride_tricks.sliding_window_view(HELD_OUT, 32)
    starts = [int(np.flatnonzero((windows == row).all(1))[0]) for row in rows.numpy()]
    assert len(set(starts)) == 10
    assert max(starts) > len(HELD_OUT) * 0.8


def test_too_little_text_is_said_before_the_first_step() -> None:
    with pytest.raises(UsageError, match=r"length=32: expected a text of at least one window, got 9 tokens"):
        CausalBatches(TEXT[:9], HELD_OUT, **OPTIONS)
    with pytest.raises(UsageError, match=r"length=32: expected a held-out text of at least one window, got 9 tokens"):
        CausalBatches(TEXT, HELD_OUT[:9], **OPTIONS)


# --- next tokens ------------------------------------------------------------------------------------------------------


def test_the_labels_of_next_tokens_are_the_tokens() -> None:
    batch = causal().at(0)
    assert batch["input_ids"].shape == (4, 32)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    text = TEXT.astype(np.int64).tobytes()
    assert all(row.tobytes() in text for row in batch["input_ids"].numpy())


# --- hidden tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "share"), [({}, 0.15), ({"share": 0.4}, 0.4)])
def test_fifteen_of_a_hundred_or_as_many_as_was_said_are_asked_for_of_which_eight_tenths_are_masks(
    options: dict[str, Any], share: float
) -> None:
    batches = masked(length=128, batch_size=64, **options)
    made = [batches.at(step) for step in range(8)]
    ids = torch.cat([batch["input_ids"] for batch in made])
    labels = torch.cat([batch["labels"] for batch in made])
    asked = labels != -100
    assert (asked.sum(1) == round(share * 126)).all()
    total = int(asked.sum())
    assert total > 9000
    masks = float((ids[asked] == 4).sum()) / total
    kept = float((ids[asked] == labels[asked]).sum()) / total
    other = 1 - masks - kept
    assert abs(masks - 0.8) < 0.02  # four standard deviations
    assert abs(kept - 0.1) < 0.015
    assert abs(other - 0.1) < 0.015


def test_what_is_not_asked_for_stands_as_it_was_between_begin_and_separator() -> None:
    batches = masked()
    batch, rows = batches.at(7), batches.windows.rows(7, 0, 4, 1)
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    assert (ids[:, 0] == 2).all()
    assert (ids[:, -1] == 3).all()
    assert np.array_equal(np.where(labels == -100, ids, labels)[:, 1:-1], rows)


def test_special_tokens_are_never_asked_for() -> None:
    text = np.where(np.arange(len(TEXT)) % 3, TEXT, np.arange(len(TEXT)) % 5)
    batches = masked(text)
    for step in range(50):
        labels = batches.at(step)["labels"]
        assert (labels[labels != -100] > 4).all()
        assert ((labels != -100).sum(1) >= 1).all()


@pytest.mark.parametrize(("random_tokens", "has_special"), [("all", True), ("ordinary", False)])
def test_the_random_token_is_of_the_whole_vocabulary_or_an_ordinary_one(random_tokens: str, has_special: bool) -> None:
    batches = masked(np.full(20_000, 9, np.uint16), random_tokens=random_tokens, batch_size=64)
    drawn: list[int] = []
    for step in range(60):
        batch = batches.at(step)
        ids = batch["input_ids"][batch["labels"] != -100]
        drawn += ids[(ids != 4) & (ids != 9)].tolist()
    assert len(drawn) > 1200
    assert (min(drawn) < 5) is has_special
    assert len(set(drawn)) > 0.9 * VOCAB


def test_a_row_of_special_tokens_alone_asks_for_nothing() -> None:
    assert (masked(np.zeros(500, np.uint16)).at(0)["labels"] == -100).all()


def test_wrong_options_of_hidden_tokens_are_errors() -> None:
    with pytest.raises(UsageError, match="share=0: expected a number above 0 and below 1"):
        masked(share=0)
    with pytest.raises(UsageError, match="random_tokens='none': expected 'all' or 'ordinary'"):
        masked(random_tokens="none")
    with pytest.raises(UsageError, match="length=2: expected at least 3"):
        masked(length=2)
    with pytest.raises(UsageError, match="all 5 tokens are special"):
        masked(vocab_size=5, random_tokens="ordinary")


# --- hidden spans -----------------------------------------------------------------------------------------------------


def authors_lengths(inputs_length: int, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """`random_spans_helper` of text-to-text-transfer-transformer, by trying every length."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise = round(tokens * density)
        holes = round(noise / mean_span)
        return tokens - noise + holes + 1, noise + holes + 1

    best = max(tokens for tokens in range(inputs_length, 2 * inputs_length) if lengths(tokens)[0] <= inputs_length)
    return best, lengths(best)[1]


@pytest.mark.parametrize("length", [20, 64, 114, 128, 256, 300, 512, 1024])
def test_lengths_are_those_of_the_authors(length: int) -> None:
    assert span_lengths(length) == authors_lengths(length)


def test_the_published_lengths() -> None:
    assert span_lengths(512) == (568, 114)  # the C4 pretraining of the paper


@given(st.integers(2, 700), st.integers(0, 2**32), st.floats(0.01, 0.9))
def test_spans_are_as_many_and_as_long_as_they_should_be(tokens: int, seed: int, share: float) -> None:
    hidden = span_mask(tokens, random_for(seed), share)
    begins = np.flatnonzero(np.diff(np.concatenate([[0], hidden.astype(int)])) == 1)
    assert len(hidden) == tokens
    assert not hidden[0]
    assert hidden[-1]
    wanted = min(max(round(tokens * share), 1), tokens - 1)
    assert hidden.sum() == wanted
    assert len(begins) == min(max(round(wanted / 3), 1), tokens - wanted)


def test_every_place_is_hidden_as_often_as_another_but_for_the_ends() -> None:
    shares = np.mean([span_mask(284, random_for(seed)) for seed in range(2000)], 0)
    assert abs(shares[20:-20].mean() - 0.15) < 0.01
    assert shares[20:-20].min() > 0.1
    assert shares[20:-20].max() < 0.2


@given(st.integers(0, 10_000), st.integers(4, 200), st.sampled_from([0.05, 0.15, 0.3, 0.5]))
def test_inputs_and_labels_together_are_the_text(step: int, length: int, share: float) -> None:
    batches = spans(length=length, batch_size=2, share=share)
    batch, rows = batches.at(step), batches.windows.rows(step, 0, 2, 1)
    assert batch["input_ids"].shape[1] <= length
    for inputs, labels, row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), rows.tolist(), strict=True):
        assert inputs.pop() == labels.pop() == 1
        told: dict[int, list[int]] = {}
        for token in labels:
            if token in SENTINELS:
                told[token] = []
                last = token
            else:
                told[last].append(token)
        assert [token for token in inputs if token in SENTINELS] == list(told)
        assert list(told) == [sentinel for sentinel, _ in zip(SENTINELS, told, strict=False)]
        whole = [part for token in inputs for part in told.get(token, [token])]
        assert whole == row


def test_rows_are_as_long_as_the_published_lengths_say() -> None:
    batch = spans(length=256).at(0)
    assert batch["input_ids"].shape == (4, 256)
    assert batch["labels"].shape == (4, span_lengths(256)[1])


def test_more_holes_than_sentinels_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"length=256: an input has 14 masked spans, more than the 5 sentinels"):
        spans(length=256, sentinels=range(VOCAB + 4, VOCAB - 1, -1))
    for length in range(4):
        with pytest.raises(UsageError, match=r"length=.: expected at least 4"):
            span_lengths(length)
