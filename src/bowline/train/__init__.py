"""Training: a loop for any module that takes `labels`, and the whole way from plain text to a trained model."""

from __future__ import annotations

from bowline.train.loop.trainer import Batches, Result, Trainer
from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["Batches", "Result", "Trainer", "TrainerSettings"]
