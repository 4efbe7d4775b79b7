"""Hidden tokens (Devlin et al., 2018): of each window a share, 15%, is to be told, most of it behind [MASK]."""

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
"""Of the tokens asked for: where [MASK] stands, and where any token does; the rest stand as they are."""


class MaskedBatches(CausalBatches):
    """Batches for a masked language model: `input_ids` and `labels`, -100 where nothing is asked.

    A row is [CLS], length - 2 tokens of the text, and [SEP]. Of the tokens that are not special, `share` is asked for,
    rounded, at least one; each of them is [MASK] with probability .8, another token with .1, itself with .1.

    Args:
        train: (N,) ids.
        held_out: (M,) ids.
        begin: the id of [CLS].
        separator: the id of [SEP].
        mask: the id of [MASK].
        vocab_size: V.
        share: of the tokens, how many are asked for. BERT's authors took 15%; Wettig et al. (2022) found more to be
            better for large models: each step then learns from more, and has less to learn it from.
        special: ids that are never asked for.
        random_tokens: "all" draws the other token from the whole vocabulary, as BERT's authors did (their
            `create_pretraining_data.py`), special tokens among it; "ordinary" leaves the special ones out.
        options: those of `CausalBatches`.

    Raises:
        UsageError: as `CausalBatches`; a share that is none; a length without room for text; a vocabulary of special
            tokens alone.
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
            raise UsageError(f"random_tokens={random_tokens!r:.60}: expected 'all' or 'ordinary'")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise UsageError(f"share={share!r:.60}: expected a number above 0 and below 1")
        self.share = share
        self.begin, self.separator, self.mask = begin, separator, mask
        self.special = np.zeros(vocab_size, bool)
        self.special[[*special, begin, separator, mask]] = True
        others = np.arange(vocab_size)
        self.others = others if random_tokens == "all" else others[~self.special]
        if not len(self.others):
            raise UsageError(f"{vocab_size} tokens, and all of them are special: expected some to draw")
        super().__init__(train, held_out, **options)

    def read_length(self, length: int) -> int:
        if length < 3:
            raise UsageError(f"a length of {length}: expected 3 or more, for [CLS], a token and [SEP]")
        return length - 2

    def made(self, rows: npt.NDArray[Any], key: tuple[int | str, ...]) -> dict[str, torch.Tensor]:
        random = random_for("mask", *key)
        ends = np.ones((len(rows), 1), np.int64)
        ids = np.concatenate([ends * self.begin, rows, ends * self.separator], 1)  # (B, length)
        ordinary = ~self.special[ids]
        order = np.where(ordinary, random.random(ids.shape), 2.0).argsort(1)  # those that may be hidden first
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
