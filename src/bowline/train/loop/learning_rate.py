"""The learning rate of each step: a linear warm-up, then a cosine (Loshchilov and Hutter, 2016)."""

from __future__ import annotations

import math

from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["learning_rate_at"]


def learning_rate_at(step: int, settings: TrainerSettings) -> float:
    """Return the learning rate of a step from 0 to steps - 1.

    During the warm-up it is (step + 1) / (warmup + 1) of the highest rate; then it falls to the lowest share. The first
    rate is not 0, at which nothing would be learned, and the last step has the lowest rate.

    Example:
        >>> settings = TrainerSettings(steps=11, learning_rate=1.0, warmup_steps=1)
        >>> [round(learning_rate_at(step, settings), 2) for step in (0, 1, 5, 10)]
        [0.5, 1.0, 0.63, 0.1]
    """
    highest, warmup = settings.learning_rate, settings.warmup
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    left = settings.steps - 1 - warmup
    done = min(1.0, (step - warmup) / left) if left > 0 else 0.0
    share = settings.min_learning_rate
    return highest * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))
