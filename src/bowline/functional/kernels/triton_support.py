"""Triton support: imports it if installed, tests whether its kernels run on a device, and multiplies in place."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache
from typing import Any, no_type_check

import torch

__all__ = ["DTYPES", "jit", "kernels_run_on", "multiply_", "tl", "triton", "triton_runs_on"]

LOG = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 8192
"""Numbers that a program holds at once, 16 of them in each of its threads."""

triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None


def jit(function: Any) -> Any:
    """`triton.jit`, or the plain function without Triton, so that files with kernels can be imported."""
    return triton.jit(function) if triton else function


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton can run on the device: on a GPU, and on a CPU while it interprets its kernels, as in tests."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def kernels_run_on(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels run on this tensor: a first kernel is tried once, and a failure is logged."""
    return tensor.dtype in DTYPES and triton_runs_on(tensor.device) and _works(tensor.device.type)


@cache
def _works(device: str) -> bool:
    try:
        importlib.import_module("triton")
        multiply_(torch.ones(64, dtype=torch.bfloat16, device=device), torch.full((), 2.0, device=device))
    except Exception as error:  # any failure: plain operations do the same
        LOG.warning(
            "Triton does not work here (%s): the loss is computed without it, more slowly",
            (str(error).splitlines() or [""])[0][:100],
        )
        return False
    return True


def multiply_(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """X, contiguous and in one of `DTYPES`, times `factor`, a scalar on its device, in place; skipped if it is 1."""
    with torch.cuda.device_of(x):  # which need not be the current one
        _multiply[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=8)
    return x


@jit
@no_type_check
def _multiply(x, factor, size, BLOCK: tl.constexpr):  # noqa: N803
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(x + at, mask=at < size).to(tl.float32) * by
        tl.store(x + at, y.to(x.dtype.element_ty), mask=at < size)
