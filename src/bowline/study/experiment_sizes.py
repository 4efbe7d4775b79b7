"""How large the experiments are: all that a result depends on beside the code."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bowline.errors import UsageError

__all__ = ["FULL", "QUICK", "ExperimentSizes"]


@dataclass(frozen=True, kw_only=True)
class ExperimentSizes:
    """Sizes of the small models that are trained, and how long and how often.

    Raises:
        UsageError: a size below 1, a width that the heads do not divide, or fewer than two seeds.
    """

    name: str = "quick"
    seeds: int = 3
    """Runs of each experiment, from seed 0 on."""
    vocab_size: int = 2048
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 8
    steps: int = 500
    """Of a run that compares models; shorter experiments take a share of it."""
    learning_rate: float = 1e-3
    held_out_batches: int = 8
    every_file: int = 3
    """Of the standard library's files: 1 takes all, 3 each third one."""
    held_out_share: float = 0.05
    few_tokens: int = 40_000
    """Where a model is to overfit: this much text, again and again."""
    sizes_vocab: int | None = None
    """The vocabulary where no training is needed; `None`: the families' true ones."""
    sizes_hidden: int | None = 128
    """The width of models that are built whole to be measured; `None`: the families' true ones."""
    queries: int = 3000
    """Vectors whose nearest rows are looked for."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise UsageError(f"{field.name}={value}: expected more than 0")
        if self.hidden_size % self.heads:
            raise UsageError(f"hidden_size={self.hidden_size}: expected a multiple of heads={self.heads}")
        if self.seeds < 2:
            raise UsageError(f"seeds={self.seeds}: expected at least 2, an error bar needs them")

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.length

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


QUICK = ExperimentSizes()
"""Minutes on two cores."""
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
"""About a day on one core."""
