"""The group of all processes of a worker, on gloo, joined and left alike by all of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

__all__ = ["joined"]


@contextmanager
def joined(seconds: float = 60.0) -> Iterator[None]:
    """Joins the group, which waits for `seconds`; at the end all leave it together, and the process ends.

    torch's caches of DTensors hold the group, and a thread of it that outlives the interpreter would end the process
    with an error.
    """
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.nn")  # imported later, it would keep a reference to the group
    distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    yield
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
