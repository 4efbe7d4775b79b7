"""Keeping freed memory in the process, because the next training step allocates about the same again.

A step of GPT-2 small allocates and frees some gigabytes on the CPU. By default glibc returns every large block to the
system, which must map it and fill it with zeros again, page by page, in the next step: about 75,000 page faults per
step, in matrix products and wherever else a result is first written.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options in malloc.h: how much may stay free at the end of the heap, and the size from which a block is mapped."""
MOST = 2**31 - 1
USUAL = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
"""The largest values that glibc chooses by itself after large blocks were freed."""
OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """Let glibc's malloc keep freed memory within this context, and return it to the system at the end.

    Does nothing for an accelerator (torch keeps that memory itself), without glibc, or if an environment variable of
    `OF_THE_USER` configures allocation.
    """
    libc = None if device.type != "cpu" or any(name in os.environ for name in OF_THE_USER) else _glibc()
    if libc is None:
        yield
        return
    for which in USUAL:
        libc.mallopt(which, MOST)
    try:
        yield
    finally:
        for which, size in USUAL.items():
            libc.mallopt(which, size)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL("libc.so.6") if platform.libc_ver()[0] == "glibc" else None
