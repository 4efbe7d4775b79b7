"""Puts large buffers on huge pages, so that the system maps 2 MiB at a time instead of 4 KiB.

Fresh memory is mapped and filled with zeros when it is first written. With small pages, for a gradient as large as an
embedding, that takes as long as a product of some hundred tokens.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

import torch

__all__ = ["on_huge_pages"]

WORTH_ASKING = 2**23
"""Bytes from which huge pages pay off; smaller buffers are mapped quickly anyway."""


def on_huge_pages(buffer: torch.Tensor) -> torch.Tensor:
    """Asks Linux for huge pages for a CPU tensor, contiguous and not yet written, and returns the tensor.

    The system may refuse (if `/sys/kernel/mm/transparent_hugepage/enabled` says "never"); nothing else changes.

    Example:
        >>> on_huge_pages(torch.empty(3, 2)).shape
        torch.Size([3, 2])
    """
    madvise = _madvise()
    if madvise is not None and buffer.device.type == "cpu" and buffer.nbytes >= WORTH_ASKING:
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
    return buffer


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
