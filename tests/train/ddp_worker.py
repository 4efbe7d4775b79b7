"""What each process of `torchrun` runs: two runs in the directory that is given, one of them ended by a signal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from bowline.train import Trainer
from tests.train.runs import Counting, run, settings, state, tiny

OPTIONS: dict[str, Any] = {"accumulation": 2, "log_every": 1, "untie_at_step": 11}


def ended(step: int) -> None:
    if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    torch.set_num_threads(1)
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    model, result = run(out / "whole", **OPTIONS)
    torch.save({"state": state(model), "held_out": result.held_out_loss}, out / f"{rank}.pt")
    try:
        Trainer(tiny(), Counting(), settings(**OPTIONS), out=out / "ended", on_step=ended).train()
    except KeyboardInterrupt as end:
        (out / f"{rank}.txt").write_text(str(end))


if __name__ == "__main__":
    main()
