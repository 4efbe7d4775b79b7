"""The settings of the training loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bowline.errors import UsageError
from bowline.train.parallel.mesh_sizes import PARALLEL, stated_mesh

__all__ = ["MAY_DIFFER", "TrainerSettings"]

MAY_DIFFER = frozenset({"log_every", "save_every", "keep", "parallel", "mesh"})
"""Settings that a resumed run may change: they affect what is written and where, but the weights only by rounding."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How `Trainer` trains. The same settings, model and batches give the same run, bit for bit on a CPU.

    Args:
        steps: optimizer steps.
        learning_rate: the highest learning rate, after the warm-up.
        min_learning_rate: the share of it that remains at the last step, after a cosine decay.
        warmup_steps: steps of a linear rise; None for a tenth of the steps, at most 100.
        embedding_rate: factor of the embedding's learning rate, but not of its decay (see `bowline.train.loop.adamw`).
        weight_decay: decay of matrices, including embeddings (see `bowline.train.loop.adamw`).
        betas: those of AdamW.
        eps: that of AdamW.
        clip: the norm at which gradients are clipped; 0 for no clipping.
        accumulation: batches per step on all processes together, so that one process and two give the same run.
        bf16: compute in bfloat16 by autocast; the weights keep their dtype.
        activation_checkpointing: keep only each block's input, and compute the rest again in the backward pass.
        compile: compile the model with `torch.compile`.
        untie_at_step: the number of steps after which the head gets a copy as its own matrix
            (`bowline.nn.untie_weights`).
        parallel: how the processes of `torchrun` share the work: "ddp" (as None; each has the whole model), "fsdp" (the
            parameters are spread over the processes), "tp" (the layers and the vocabulary are split) or "pp" (each has
            some of the layers).
        mesh: a combination instead, with the number of processes along each dimension, such as "fsdp=2,tp=2".
        seed: the seed of dropout. The model and the batches have their own seeds.
        log_every: steps between records; the first step and the last have one too.
        evaluate_every: steps between evaluations on the held-out batches; the last step has one too.
        save_every: steps between checkpoints; the last step has one too.
        keep: number of checkpoints to keep.

    Raises:
        UsageError: an invalid value.

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
    parallel: str | None = None
    mesh: str | None = None
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
        if self.parallel not in (None, *PARALLEL):
            raise UsageError(
                f"parallel={self.parallel!r:.60}: expected one of {', '.join(PARALLEL)}", argument="parallel"
            )
        if self.mesh is not None:
            stated_mesh(self.mesh)
            if self.parallel is not None:
                raise UsageError(
                    "parallel and mesh: both say how the processes are arranged",
                    help="leave one of them out",
                    argument=("parallel", "mesh"),
                )
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
            UsageError: a name that is not a setting, or an invalid value.
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
