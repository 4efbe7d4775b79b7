"""Two processes of a test that talk to each other over the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["of_two_processes"]

ROOT = Path(__file__).parents[1]


def of_two_processes(module: str, place: Path) -> list[dict[Any, Any]]:
    """What `python -m module RANK STORE OUT` of each saved at OUT.RANK."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(place / "store"), str(place / "out")],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=240)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [torch.load(f"{place / 'out'}.{rank}") for rank in range(2)]
