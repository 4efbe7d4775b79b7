"""Memory of oneDNN's results: counts page faults of a step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

BLOCKS, PAGES = 3, 2**23 // 4096
"""Products in a step, of 8 MiB each, and the pages of one."""
STEPS = 10
PROBE = f"""
import resource, torch
from bowline.functional.loss.chunks.cpu_matmul import keep_freed_blocks

def step():
    made = [torch.ones(2**21) for _ in range({BLOCKS})]

keep_freed_blocks()
for _ in range({STEPS}):  # the first ones find their places
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_blocks_are_not_mapped_again() -> None:
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    done = subprocess.run([sys.executable, "-c", PROBE], check=True, stdout=subprocess.PIPE, text=True, env=usual)
    assert int(done.stdout) < PAGES  # of the 30 times as many that are written
