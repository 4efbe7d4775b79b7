"""The sizes of the experiments: results depend on these and on the code only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bowline.errors import UsageError

__all__ = ["FULL", "QUICK", "ExperimentSizes"]


@dataclass(frozen=True, kw_only=True)
class ExperimentSizes:
    """The sizes of the small models to train, and for how long and how often to train them.

    Raises:
        UsageError: a size of 0 or less, a width that is not a multiple of the heads, or fewer than two seeds.
    """

    name: str = "quick"
    seeds: int = 3
    """The number of runs of each experiment, with seeds from 0."""
    vocab_size: int = 2048
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 8
    steps: int = 500
    """The steps of a run that compares models; shorter experiments take a share of them."""
    learning_rate: float = 1e-3
    held_out_batches: int = 8
    every_file: int = 3
    """Every n-th file of the standard library is used: 1 means all files, 3 every third one."""
    held_out_share: float = 0.05
    few_tokens: int = 40_000
    """The number of tokens for experiments that overfit, read again and again."""
    sizes_vocab: int | None = None
    """The vocabulary of experiments without training; `None` means each family's true one."""
    sizes_hidden: int | None = 128
    """The width of models that are measured without training; `None` means each family's true one."""
    queries: int = 3000
    """The number of vectors whose nearest rows are searched."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise UsageError(f"{field.name}={value}: expected more than 0")
        if self.hidden_size % self.heads:
            raise UsageError(f"hidden_size={self.hidden_size}: expected a multiple of heads={self.heads}")
        if self.seeds < 2:
            raise UsageError(f"seeds={self.seeds}: expected at least 2, because a standard error needs them")

    @property
    def tokens(self) -> int:
        """The tokens of one step."""
        return self.batch * self.length

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


QUICK = ExperimentSizes()
"""Sizes that take minutes on two cores."""
FULL = ExperimentSizes(
    name="full",
    seeds=5,
    vocab_size=8192,
    hidden_size=192,
    layers=4,
    heads=6,
    length=128,
    batch=16,
    steps=3000,
    held_out_batches=48,
    every_file=1,
    few_tokens=200_000,
    sizes_hidden=None,
    queries=20_000,
)
"""Sizes that take about a day on one core."""
