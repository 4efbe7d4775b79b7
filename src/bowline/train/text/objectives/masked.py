"""The objective of masked tokens (Devlin et al., 2018): predict 15% of each window, most of it replaced by [MASK]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bowline.errors import UsageError
from bowline.train.text.objectives.causal import CausalBatches
from bowline.train.text.objectives.windows import random_for

__all__ = ["MaskedBatches"]

REPLACED, RANDOM = 0.8, 0.1
"""The shares of the predicted tokens that become [MASK], and another token. The rest are not changed."""


class MaskedBatches(CausalBatches):
    """Batches for a masked language model: `input_ids`, and `labels` that are -100 at tokens not to predict.

    A row is [CLS], length - 2 tokens of the text, and [SEP]. The model predicts `share` of the tokens that are not
    special, rounded, but at least one. Each of them becomes [MASK] with probability .8, another token with .1, and is
    unchanged with .1.

    Args:
        train: (N,) ids.
        held_out: (M,) ids.
        begin: the id of [CLS].
        separator: the id of [SEP].
        mask: the id of [MASK].
        vocab_size: V.
        share: the share of tokens to predict. BERT's authors used 15%. Wettig et al. (2022) found a larger share better
            for large models: each step then has more tokens to predict, and less context to predict them from.
        special: ids that are never predicted.
        random_tokens: "all" draws the other token from the whole vocabulary, including special tokens, as BERT's
            authors did (their `create_pretraining_data.py`); "ordinary" excludes special tokens.
        options: those of `CausalBatches`.

    Raises:
        UsageError: as `CausalBatches`; a share that is not between 0 and 1; a length without room for text; only
            special tokens in the vocabulary.
    """

    def __init__(
        self,
        train: npt.NDArray[Any],
        held_out: npt.NDArray[Any],
        *,
        begin: int,
        separator: int,
        mask: int,
        vocab_size: int,
        share: float = 0.15,
        special: Collection[int] = (),
        random_tokens: str = "all",
        **options: Any,
    ) -> None:
        if random_tokens not in ("all", "ordinary"):
            raise UsageError(
                f"random_tokens={random_tokens!r:.60}: expected 'all' or 'ordinary'", argument="random_tokens"
            )
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise UsageError(f"share={share!r:.60}: expected a number above 0 and below 1", argument="share")
        self.share = share
        self.begin, self.separator, self.mask = begin, separator, mask
        self.special = np.zeros(vocab_size, bool)
        self.special[[*special, begin, separator, mask]] = True
        others = np.arange(vocab_size)
        self.others = others if random_tokens == "all" else others[~self.special]
        if not len(self.others):
            raise UsageError(f"all {vocab_size} tokens are special: expected ordinary ones to draw replacements from")
        super().__init__(train, held_out, **options)

    def read_length(self, length: int) -> int:
        if length < 3:
            raise UsageError(f"length={length}: expected at least 3, for [CLS], a token and [SEP]", argument="length")
        return length - 2

    def made(self, rows: npt.NDArray[Any], key: tuple[int | str, ...]) -> dict[str, torch.Tensor]:
        random = random_for("mask", *key)
        ends = np.ones((len(rows), 1), np.int64)
        ids = np.concatenate([ends * self.begin, rows, ends * self.separator], 1)  # (B, length)
        ordinary = ~self.special[ids]
        order = np.where(ordinary, random.random(ids.shape), 2.0).argsort(1)  # tokens that can be masked come first
        may = ordinary.sum(1, keepdims=True)
        wanted = np.minimum(np.maximum(np.rint(may * self.share), 1), may)
        asked = np.zeros(ids.shape, bool)
        np.put_along_axis(asked, order, np.arange(ids.shape[1]) < wanted, 1)
        labels = np.where(asked, ids, -100)
        how = random.random(ids.shape)
        other = self.others[random.integers(len(self.others), size=ids.shape)]
        ids = np.where(asked & (how < REPLACED), self.mask, ids)
        ids = np.where(asked & (how >= REPLACED) & (how < REPLACED + RANDOM), other, ids)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
