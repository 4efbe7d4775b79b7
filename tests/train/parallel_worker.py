"""What each process of `torchrun` runs: the same training by every scheme, and runs that go on by another."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bowline.errors import BowlineError
from bowline.nn import untie_weights
from bowline.train import Result, Trainer
from bowline.train.parallel.processes import end_process, is_first
from tests.distributed.models import built
from tests.train.runs import Counting, settings

OPTIONS: dict[str, Any] = {
    "steps": 8,
    "learning_rate": 1e-3,
    "accumulation": 4,
    "embedding_rate": 2.0,
    "clip": 0.5,
    "log_every": 1,
    "evaluate_every": 4,
    "save_every": 4,
}
"""The norm is above the clip at every step, so that one that counts a matrix twice changes the parameters."""
FAMILIES = ("gpt2", "bert", "t5", "gpt2 untied")
TWO: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "tp": {"parallel": "tp"},
    "pp": {"parallel": "pp"},
}
FOUR: dict[str, dict[str, Any]] = {
    "fsdp-tp": {"mesh": "fsdp=2,tp=2"},
    "ddp-fsdp": {"mesh": "ddp=2,fsdp=2"},
    "pp-fsdp": {"mesh": "pp=2,fsdp=2"},
    "fsdp": {"parallel": "fsdp"},
}
CHANGES = {"fsdp then pp": ("fsdp", "pp"), "pp then tp": ("pp", "tp"), "tp then fsdp": ("tp", "fsdp")}
REFUSED: dict[str, dict[str, Any]] = {
    "places": {"mesh": "fsdp=3"},
    "shares": {"parallel": "fsdp", "accumulation": 3},
    "untie": {"parallel": "fsdp", "untie_at_step": 2},
    "compile": {"parallel": "tp", "compile": True},
}


def made(name: str) -> Any:
    """The model of that name; an untied head is another matrix than the embedding."""
    model: Any = built(name.removesuffix(" untied"))
    if name.endswith(" untied"):
        untie_weights(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)
    return model


def run(name: str, out: Path | None, *, until: int | None = None, **options: Any) -> Result:
    def stop(step: int) -> None:
        if step == until:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(
        made(name), Counting(), settings(**{**OPTIONS, **options}), out=out, resume=out is not None, on_step=stop
    )
    return trainer.train()


def said(**options: Any) -> str:
    try:
        run("gpt2", None, **options)
    except BowlineError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    schemes = TWO if os.environ["WORLD_SIZE"] == "2" else FOUR
    found: dict[str, Any] = {}
    for scheme, options in schemes.items():
        for name in FAMILIES:
            result = run(name, out / f"{scheme} {name}", **options)
            found[f"{scheme} {name}"] = [dict(record) for record in result.history] if is_first() else result.step
    if schemes is TWO:
        for change, (before, after) in CHANGES.items():
            try:
                run("gpt2", out / change, until=4, **TWO[before])
            except KeyboardInterrupt as stopped:
                found[change] = str(stopped)
            run("gpt2", out / change, **TWO[after])
        found["refused"] = {name: said(**options) for name, options in REFUSED.items()}
    torch.save(found, out / f"{os.environ['RANK']}.pt")
    distributed.barrier()
    end_process()


if __name__ == "__main__":
    main()
