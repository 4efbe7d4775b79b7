"""What a step is given: batches by number, the loss that a model makes of one, and what is counted in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from bowline.errors import UsageError

__all__ = ["Batch", "Batches", "count_labels", "count_tokens", "loss_of", "mixed_seed"]

Batch: TypeAlias = dict[str, torch.Tensor]
IGNORED = -100


class Batches(Protocol):
    """The batch of a step is a function of its number (and of a seed) alone: the data position is the step."""

    def at(self, step: int, micro: int = 0) -> Batch:
        """The arguments of `model(**batch)`, `labels` among them; steps from 0, and the batches of one from 0."""

    def held_out(self) -> Iterable[Batch]:
        """Batches that are never trained on, the same every time."""


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned.

    Raises:
        UsageError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        of = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else "no loss"
        raise UsageError(
            f"the model returned a {type(output).__name__} with {of}, expected one number to train on",
            help="a batch needs `labels`, and the model a loss that it computes from them",
        )
    return loss.reshape(())


def count_labels(batch: Batch) -> int:
    """The labels that count: what a loss is a mean over. A causal model leaves out the first of each row as well."""
    labels = batch.get("labels")
    return 1 if labels is None else int((labels != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """The tokens that are read."""
    return batch["input_ids"].numel() if "input_ids" in batch else max(tensor.numel() for tensor in batch.values())


def mixed_seed(*numbers: int) -> int:
    """63 bits in which all of `numbers` have their part (SplitMix64; Steele, Lea and Flood, 2014).

    Example:
        >>> len({mixed_seed(0, step, micro) % 2**32 for step in range(100) for micro in range(4)})
        400
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1
