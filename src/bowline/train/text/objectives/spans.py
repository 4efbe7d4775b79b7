"""The objective of masked spans (Raffel et al., 2020): T5 reads text with holes and predicts what was in them.

    text      the knot holds and does not slip
    input     the <extra_id_0> and does <extra_id_1> slip </s>
    labels    <extra_id_0> knot holds <extra_id_1> not </s>

Lengths follow the authors' code (`text-to-text-transfer-transformer`, `preprocessors.py`: `random_spans_helper`,
`random_spans_noise_mask`): the number of text tokens is chosen so that inputs have `length`, and no row is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bowline.errors import UsageError
from bowline.train.text.objectives.causal import CausalBatches
from bowline.train.text.objectives.windows import random_for

__all__ = ["SpanBatches", "span_lengths", "span_mask"]

DENSITY, MEAN_SPAN = 0.15, 3.0


def spans_of(tokens: int, density: float = DENSITY, mean_span: float = MEAN_SPAN) -> tuple[int, int]:
    """Return how many of `tokens` tokens are masked, and in how many spans."""
    hidden = min(max(round(tokens * density), 1), tokens - 1)
    return hidden, min(max(round(hidden / mean_span), 1), hidden, tokens - hidden)


def span_lengths(length: int, density: float = DENSITY, mean_span: float = MEAN_SPAN) -> tuple[int, int]:
    """Return the most text tokens whose input is at most `length` long, and the length of their labels.

    Example:
        >>> span_lengths(512)
        (568, 114)
    """
    if length < 4:
        raise UsageError(
            f"length={length}: expected at least 4, for a token, a masked span and the end", argument="length"
        )

    def made(tokens: int) -> tuple[int, int]:
        hidden, spans = spans_of(tokens, density, mean_span)
        return tokens - hidden + spans + 1, hidden + spans + 1

    tokens = 2
    while made(tokens + 1)[0] <= length:
        tokens += 1
    return tokens, made(tokens)[1]


def span_mask(
    tokens: int, random: np.random.Generator, density: float = DENSITY, mean_span: float = MEAN_SPAN
) -> npt.NDArray[np.bool_]:
    """Draw which tokens are masked, (tokens,). The text comes first; spans and gaps have at least one token."""
    hidden, spans = spans_of(tokens, density, mean_span)
    lengths = np.stack([_cut(tokens - hidden, spans, random), _cut(hidden, spans, random)], 1).ravel()
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def _cut(items: int, parts: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Cut `items` into `parts` lengths of at least one, with equal probability for every way to cut."""
    ends = np.sort(random.choice(items - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], ends, [items]]))


class SpanBatches(CausalBatches):
    """Batches for T5: `input_ids` (batch_size, length) and shorter `labels`, which the model shifts for its decoder.

    Args:
        train: (N,) ids.
        held_out: (M,) ids.
        sentinels: the ids of <extra_id_0>, <extra_id_1>, ...
        eos: the id that ends inputs and labels.
        share: the share of tokens to mask.
        options: those of `CausalBatches`.

    Raises:
        UsageError: as `CausalBatches`; fewer sentinels than holes in a row.
    """

    def __init__(
        self,
        train: npt.NDArray[Any],
        held_out: npt.NDArray[Any],
        *,
        sentinels: Sequence[int],
        eos: int,
        share: float = DENSITY,
        **options: Any,
    ) -> None:
        self.sentinels, self.eos, self.share = np.asarray(sentinels, np.int64), eos, share
        super().__init__(train, held_out, **options)

    def read_length(self, length: int) -> int:
        tokens, _ = span_lengths(length, self.share)
        holes = spans_of(tokens, self.share)[1]
        if holes > len(self.sentinels):
            raise UsageError(
                f"length={length}: an input has {holes} masked spans, more than the {len(self.sentinels)} sentinels of "
                "the tokenizer",
                help="give a smaller --length, or a tokenizer with more <extra_id_N> tokens",
                argument="length",
            )
        return tokens

    def made(self, rows: npt.NDArray[Any], key: tuple[int | str, ...]) -> dict[str, torch.Tensor]:
        random = random_for("spans", *key)
        pairs = [self._cut(row, span_mask(len(row), random, self.share)) for row in rows]
        inputs, labels = (torch.from_numpy(np.stack(side)) for side in zip(*pairs, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _cut(self, row: npt.NDArray[Any], hidden: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self._holes(row, hidden), self._holes(row, ~hidden)

    def _holes(self, row: npt.NDArray[Any], hole: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """Replace each hole in the row by a sentinel, and append the end token."""
        begins = hole & ~np.concatenate([[False], hole[:-1]])
        number = begins.cumsum() - 1  # in labels the text before the first span is a hole, so both count alike
        filled = np.where(begins, self.sentinels[number * begins], row)
        return np.append(filled[~hole | begins], self.eos)
