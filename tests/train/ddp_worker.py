"""What each process of `torchrun` runs: two runs in the directory that is given, one of them ended by a signal."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from bowline.train import Trainer
from tests.train.runs import Counting, run, settings, state, tiny

OPTIONS: dict[str, Any] = {"accumulation": 2, "log_every": 1, "untie_at_step": 11}
KEPT: list[Trainer] = []
"""Somebody's own script may hold its trainer until the interpreter is gone."""


def ended(step: int) -> None:
    if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)


def threads_of_gloo() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def main() -> None:
    torch.set_num_threads(1)
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    if sys.platform == "linux":  # registered before the group's own end, so it runs after it
        atexit.register(lambda: (out / f"{rank}.threads").write_text(" ".join(threads_of_gloo())))
    model, result = run(out / "whole", **OPTIONS)
    torch.save({"state": state(model), "held_out": result.held_out_loss}, out / f"{rank}.pt")
    KEPT.append(Trainer(tiny(), Counting(), settings(**OPTIONS), out=out / "ended", on_step=ended))
    try:
        KEPT[0].train()
    except KeyboardInterrupt as end:
        (out / f"{rank}.txt").write_text(str(end))


if __name__ == "__main__":
    main()
