"""A table of a checkpoint whose rows are read on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.progress import Progress
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["CheckpointTable"]


class CheckpointTable:
    """A table of a checkpoint as a `bowline.geometry.TableSource`. Reports each row as progress once."""

    def __init__(self, checkpoint: Checkpoint, tensor: StoredTensor, progress: Progress) -> None:
        self.shape = (tensor.shape[0], tensor.shape[1])
        self._checkpoint = checkpoint
        self._tensor = tensor
        self._progress = progress
        self._reported = 0

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows `[start, stop)`."""
        found = self._checkpoint.rows(self._tensor.name, start, stop)
        if start <= self._reported < stop:
            self._progress.advance((stop - self._reported) * (self._tensor.nbytes // self.shape[0]))
            self._reported = stop
        return found

    def take(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows of these ascending numbers, with one read for each run of consecutive rows."""
        runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
        return np.concatenate(
            [
                self._checkpoint.rows(self._tensor.name, int(run[0]), int(run[-1]) + 1)
                if run.size
                else self._checkpoint.rows(self._tensor.name, 0, 0)
                for run in runs
            ]
        )
