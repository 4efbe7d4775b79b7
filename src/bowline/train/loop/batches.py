"""Batches by step number, the loss in a model's output, and the counts of labels and tokens in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from bowline.errors import UsageError

__all__ = ["Batch", "Batches", "count_labels", "count_tokens", "loss_of", "mixed_seed"]

Batch: TypeAlias = dict[str, torch.Tensor]
IGNORED = -100


class Batches(Protocol):
    """A source of batches. Each batch depends only on the step number and a seed, so a resumed run needs no more."""

    def at(self, step: int, micro: int = 0) -> Batch:
        """Return the arguments of `model(**batch)`, with `labels`. Steps count from 0, as do the batches of a step."""

    def held_out(self) -> Iterable[Batch]:
        """Return batches that are never trained on, the same in every call."""


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        UsageError: the output has no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        of = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else "no loss"
        raise UsageError(
            f"the model returned a {type(output).__name__} with {of}, expected a loss of one number",
            help="put `labels` into each batch, and let the model compute its loss from them",
        )
    return loss.reshape(())


def count_labels(batch: Batch) -> int:
    """Count the labels that a loss averages over. Causal models also leave out the first label of each row."""
    labels = batch.get("labels")
    return 1 if labels is None else int((labels != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """Count the tokens that the model reads."""
    return batch["input_ids"].numel() if "input_ids" in batch else max(tensor.numel() for tensor in batch.values())


def mixed_seed(*numbers: int) -> int:
    """Mix all of `numbers` into a seed of 63 bits (SplitMix64; Steele, Lea and Flood, 2014).

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
