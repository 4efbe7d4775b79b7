"""What oneDNN's results are written into: page faults, counted by the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

BLOCKS, PAGES = 3, 2**23 // 4096
"""Of 8 MiB each, in a step."""
STEPS = 10
PROBE = f"""
import resource, sys, torch
from bowline.nn.loss.sweep.cpu_products import keep_freed_blocks

def step():
    made = [torch.ones(2**21) for _ in range({BLOCKS})]

if sys.argv[1] == "kept":
    keep_freed_blocks()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_blocks_are_not_mapped_again() -> None:
    found = {}
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    for how in ("kept", "not kept"):
        command = [sys.executable, "-c", PROBE, how]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=usual)
        found[how] = int(done.stdout)
    assert found["kept"] < PAGES < STEPS * BLOCKS * PAGES / 2 < found["not kept"]
