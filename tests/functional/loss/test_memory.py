"""Peak memory of a step, measured by the system: one gradient of the matrix, and the budget.

glibc keeps an arbitrary amount of freed memory, which blurs the peak; here it is set to return freed memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE, WIDTH, ROWS = 40000, 64, 2048
PROBE = """
import ctypes, gc, sys, torch
from torch.nn import functional as F
from bowline.functional.loss import linear_cross_entropy, resources

size, width, rows, dtype, backend, backward = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7]
torch.manual_seed(0)
cast = dtype == "autocast"
weight = (torch.randn(size, width) * 0.02).to(torch.float32 if cast else getattr(torch, dtype)).requires_grad_()
labels = torch.randint(0, size, (rows,))

def step(rows):
    hidden = torch.randn(rows, width).to(weight.dtype).requires_grad_()
    with torch.set_grad_enabled(backward == "backward"), resources(onednn=False), torch.autocast(
        "cpu", torch.bfloat16, enabled=cast
    ):  # oneDNN's scratch is its own
        loss = linear_cross_entropy(hidden, weight, labels[:rows], backend=backend)
    if backward == "backward":
        loss.backward()
        weight.grad = None

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

step(rows)
peaks = []
for _ in range(3):  # the least: a kernel may take idle pages back, which then count again
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    step(rows)
    peaks.append((status("VmHWM") - before) / 1024)
print(min(peaks))
"""


def peak_mebibytes(dtype: str, backend: str, backward: bool) -> float:
    arguments = [str(SIZE), str(WIDTH), str(ROWS), dtype, backend, "backward" if backward else "forward"]
    command = [sys.executable, "-c", PROBE, *arguments]
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=given_back)
    return float(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
@pytest.mark.parametrize(("dtype", "bytes_"), [("float32", 4), ("bfloat16", 2), ("autocast", 4)])
@pytest.mark.parametrize("backward", [True, False])
def test_the_peak_is_one_gradient_of_the_matrix_and_the_budget(dtype: str, bytes_: int, backward: bool) -> None:
    gradient = SIZE * WIDTH * bytes_ / 2**20 if backward else 0
    logits = SIZE * ROWS * 2 / 2**20
    peak = peak_mebibytes(dtype, "chunked", backward)
    assert peak < gradient + 64
    assert gradient + 64 < logits  # or the bound would say nothing


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_the_measure_sees_logits_where_they_are_kept() -> None:
    assert peak_mebibytes("float32", "logits", backward=True) > SIZE * ROWS * 4 / 2**20
