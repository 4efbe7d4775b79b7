"""What a step frees stays with the process for the next step, which asks for about the same.

A step of GPT-2 small allocates and frees some gigabytes on the CPU. By itself glibc hands every large block back to the
system, which has to map it and fill it with zeros anew, page by page, at the next step: about 75,000 page faults of
each, within products and wherever else a result is first written.
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
"""malloc.h: how much may lie free at the end of the heap, and from what size on a block is mapped by itself."""
MOST = 2**31 - 1
USUAL = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
"""The largest values that glibc gives itself, which large blocks lead it to."""
OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """Within it, glibc's malloc keeps what is freed; at its end what is free goes back to the system.

    It does nothing for an accelerator (torch keeps that memory itself), without glibc, and where the environment says
    how to allocate: any of `OF_THE_USER`.
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
