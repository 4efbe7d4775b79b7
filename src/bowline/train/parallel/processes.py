"""The processes of one distributed run, and sums that all of them wait for."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed

__all__ = ["Processes", "end_process", "is_first", "joined"]

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The variable that is set in the processes of `torchrun`."""


def is_first() -> bool:
    """True if this process writes files and messages: it is the only process, or number 0 of its group."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


class Processes:
    """The group of `count` processes, of which this one is number `rank`; without `torchrun` it is 0 of 1."""

    def __init__(self) -> None:
        self.together = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self.together else 0
        self.count = distributed.get_world_size() if self.together else 1
        # Values on the CPU are summed on the CPU, without waiting for an accelerator.
        others = self.together and distributed.get_backend() != "gloo"
        self._talk = distributed.new_group(backend="gloo") if others else None

    @property
    def first(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes, in float64; every process waits for all others."""
        if not self.together:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, group=self._talk)
        return tensor.tolist()


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started into a group, or use the group that exists already.

    The group stays until the process ends, because a process cannot join a second one.
    """
    if distributed.is_available() and not distributed.is_initialized() and TORCHRUN in os.environ:
        importlib.import_module("torch.distributed.nn")  # imported later, it would keep a reference to the group
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    yield Processes()


def end_process() -> None:
    """End this process well, now, if `torchrun` started it; otherwise do nothing.

    torch's caches of DTensors hold the group, and with it threads of gloo that can outlive the interpreter and end the
    process with an error, after everything has been saved (torch 2.13).
    """
    if TORCHRUN in os.environ and distributed.is_initialized():
        distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _leave() -> None:
    """End the group and its threads before the interpreter ends. Nothing else may hold the group then.

    Otherwise a thread of gloo that releases a tensor too late ends the whole process: "terminate called without an
    active exception".
    """
    if distributed.is_initialized():
        gc.collect()  # a model that was spread out, and is held by a cycle
        distributed.destroy_process_group()
