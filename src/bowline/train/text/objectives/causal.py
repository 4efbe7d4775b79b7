"""The objective of next tokens: the labels are the text itself, and the models shift them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch

from bowline.train.text.objectives.windows import Windows

__all__ = ["HELD_OUT", "CausalBatches"]

HELD_OUT = 2**16
"""The most held-out tokens that an evaluation reads, unless another number is given."""


class CausalBatches:
    """Batches for models that predict the next token: `input_ids` and `labels`, both (batch_size, length).

    Args:
        train: (N,) ids.
        held_out: (M,) ids.
        length: the tokens of a window; all but the first are predicted.
        batch_size: the windows of a batch.
        accumulation: the batches of a step.
        seed: the seed of the windows' order.
        held_out_tokens: the largest number of tokens that an evaluation reads.

    Raises:
        UsageError: the training text or the held-out text is shorter than one window.
    """

    def __init__(
        self,
        train: npt.NDArray[Any],
        held_out: npt.NDArray[Any],
        *,
        length: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        held_out_tokens: int = HELD_OUT,
    ) -> None:
        self.windows = Windows(train, self.read_length(length), seed=seed)
        self.kept, self.most = held_out, held_out_tokens
        self.batch_size, self.accumulation, self.seed = batch_size, accumulation, seed
        next(self.held_out())  # too little text raises now, not at the first evaluation

    @property
    def epoch(self) -> float:
        """The number of steps in which every window is seen once."""
        return len(self.windows) / (self.batch_size * self.accumulation)

    def read_length(self, length: int) -> int:
        """Return the number of text tokens from which an input of `length` is made."""
        return length

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        """Return batch number `micro` of a step."""
        rows = self.windows.rows(step, micro, self.batch_size, self.accumulation)
        return self.made(rows, ("train", self.seed, step, micro))

    def held_out(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches of the held-out text, the same in every call and for every seed."""
        windows = Windows.in_order(self.kept, self.windows.length, self.batch_size, self.most)
        for at, rows in enumerate(windows):
            yield self.made(rows, ("held out", at))

    def made(self, rows: npt.NDArray[Any], key: tuple[int | str, ...]) -> dict[str, torch.Tensor]:
        """Make the model's inputs from these windows. Random choices depend on `key`."""
        ids = torch.from_numpy(rows)
        return {"input_ids": ids, "labels": ids}
