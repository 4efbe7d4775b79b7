"""The processes of one run: which batches are whose, and what all must know before any may go on."""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed

from bowline.errors import UsageError

__all__ = ["Processes", "is_first", "joined"]


def is_first() -> bool:
    """Whether this process is the one that writes, and speaks to a person: the only one, or number 0 of its group."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


class Processes:
    """`count` processes, of which this one is number `rank`; one of one where nothing was started by `torchrun`."""

    def __init__(self) -> None:
        self.together = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self.together else 0
        self.count = distributed.get_world_size() if self.together else 1
        # What is on the CPU is agreed upon on the CPU, and no accelerator is waited for.
        others = self.together and distributed.get_backend() != "gloo"
        self._talk = distributed.new_group(backend="gloo") if others else None

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def share(self, accumulation: int) -> range:
        """The numbers of this process's batches in a step.

        Raises:
            UsageError: the batches of a step cannot be shared out evenly.
        """
        if accumulation % self.count:
            raise UsageError(
                f"accumulation={accumulation} on {self.count} processes: expected a multiple of {self.count}, as it is "
                "the number of batches of one step, all processes together",
                help=f"accumulation={self.count * max(1, accumulation // self.count)}",
            )
        return range(self.rank, accumulation, self.count)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in float64."""
        if not self.together:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, group=self._talk)
        return tensor.tolist()


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that `torchrun` started, as a group; it stays until the process ends, for a second run joins none.

    A group that exists already is used.
    """
    if distributed.is_available() and not distributed.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ:
        importlib.import_module("torch.distributed.nn")  # or, imported later, it holds the group in its defaults
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    yield Processes()


def _leave() -> None:
    """Ends the group and its threads, while there is an interpreter; nothing else may hold the group then.

    A thread of gloo that lets go of a tensor later is ended by what is left of it, and takes the process along:
    "terminate called without an active exception".
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
