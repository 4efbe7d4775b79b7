"""What the loop alone needs to be told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bowline.errors import UsageError

__all__ = ["MAY_DIFFER", "TrainerSettings"]

MAY_DIFFER = frozenset({"log_every", "save_every", "keep"})
"""What a resumed run may have otherwise: these change what is written, and no weight."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How `Trainer` trains. The same settings, model and batches give the same run, bit for bit on a CPU.

    Args:
        steps: optimizer steps.
        learning_rate: the highest, after warm-up.
        min_learning_rate: the share of it that is left at the last step; cosine between.
        warmup_steps: of a linear rise; None for a tenth of the steps, at most 100.
        embedding_rate: what the embedding's rate is multiplied by (see `bowline.train.loop.adamw`); not its decay.
        weight_decay: of matrices, embeddings among them (see `bowline.train.loop.adamw`).
        betas: AdamW's.
        eps: AdamW's.
        clip: the norm to which a longer gradient is cut; 0 for none.
        accumulation: batches of one step, all processes together: a run is the same on one process and on two.
        bf16: autocast to bfloat16; the weights stay as they are.
        activation_checkpointing: keep each block's input alone, and compute the rest again.
        compile: `torch.compile` the model.
        untie_at_step: after so many steps the head gets a matrix of its own, a copy (`bowline.nn.untie_weights`).
        seed: of dropout. The model and the batches have their own.
        log_every: steps between records; the first step and the last have one too.
        evaluate_every: steps between evaluations on the held-out batches; the last step has one too.
        save_every: steps between checkpoints; the last step has one too.
        keep: how many checkpoints stay.

    Raises:
        UsageError: a value that means nothing.

    Example:
        >>> TrainerSettings(steps=300).warmup
        30
    """

    steps: int
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.1
    warmup_steps: int | None = None
    embedding_rate: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    accumulation: int = 1
    bf16: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    untie_at_step: int | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    save_every: int = 200
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "log_every", "evaluate_every", "save_every", "keep"):
            self._check_whole(name, 1)
        self._check_whole("seed", 0)
        for name in ("warmup_steps", "untie_at_step"):
            if getattr(self, name) is not None:
                self._check_whole(name, 0)
        for name in ("learning_rate", "embedding_rate", "eps"):
            self._check_number(name, above=0.0)
        for name in ("weight_decay", "clip"):
            self._check_number(name)
        self._check_number("min_learning_rate", most=1.0)
        for name in ("bf16", "activation_checkpointing", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r:.60}: expected True or False", argument=name)
        betas: Any = self.betas
        if (
            not isinstance(betas, (tuple, list))
            or len(betas) != 2
            or not all(_is_number(b) and 0 <= b < 1 for b in betas)
        ):
            raise UsageError(f"betas={betas!r:.60}: expected two numbers, each from 0 to below 1", argument="betas")
        object.__setattr__(self, "betas", (float(betas[0]), float(betas[1])))  # JSON has lists

    @property
    def warmup(self) -> int:
        """The steps of warm-up."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainerSettings:
        """The settings that `to_dict` wrote.

        Raises:
            UsageError: a name that is none of the settings', or a value that means nothing.
        """
        unknown = sorted(set(content) - {field.name for field in dataclasses.fields(cls)})
        if unknown or "steps" not in content:
            seen = f"{unknown[0]}: is not a setting of a training run" if unknown else "the number of steps is missing"
            raise UsageError(seen, help="see bowline.train.TrainerSettings")
        return cls(**content)

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise UsageError(f"{name}={value!r:.60}: expected a whole number from {least}", argument=name)

    def _check_number(self, name: str, *, above: float | None = None, most: float = math.inf) -> None:
        value = getattr(self, name)
        low = 0.0 if above is None else above
        if not _is_number(value) or value < low or (above is not None and value == above) or value > most:
            expected = f"a number {'from' if above is None else 'above'} {low:g}"
            upper = f" to {most:g}" if most < math.inf else ""
            raise UsageError(f"{name}={value!r:.60}: expected {expected}{upper}", argument=name)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond float64
        return False
