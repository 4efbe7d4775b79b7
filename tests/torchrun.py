"""Runs a module in several processes of this machine alone, as `torchrun` would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["under_torchrun"]

ROOT = Path(__file__).parents[1]


def under_torchrun(
    module: str, *arguments: str, processes: int = 2, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """The finished run; unless it `fails`, it has to end well."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--nnodes=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode != 0) is fails, done.stderr
    return done
