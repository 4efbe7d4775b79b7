"""The public names of `bowline.train`, listed once: `lazy_loader` reads this file, and so do type checkers."""

from .loop.trainer import Batches as Batches
from .loop.trainer import Result as Result
from .loop.trainer import Trainer as Trainer
from .loop.trainer_settings import TrainerSettings as TrainerSettings
