"""Training: a loop for any module with `labels`, and from plain text to a tied model that is trained."""

from __future__ import annotations

from bowline.train.loop.trainer import Batches, Result, Trainer
from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["Batches", "Result", "Trainer", "TrainerSettings"]
