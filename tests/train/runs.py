"""Tiny runs: a tied GPT-2 with dropout, on sequences that can be learnt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bowline.models import GPT2Config, GPT2LMHeadModel
from bowline.train import Result, Trainer, TrainerSettings

SIZE, LENGTH = 23, 8


class Counting:
    """Rows that count upwards by 1 or 2: half of it can be learnt at once."""

    def __init__(self, rows: int = 4, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * (100 * self.seed + step) + micro)
        start = torch.randint(SIZE, (self.rows, 1), generator=generator)
        pace = torch.randint(1, 3, (self.rows, LENGTH), generator=generator)
        ids = (start + pace.cumsum(1)) % SIZE
        return {"input_ids": ids, "labels": ids}

    def held_out(self) -> Iterable[dict[str, torch.Tensor]]:
        return [Counting(self.rows, self.seed + 1).at(step) for step in range(3)]


def tiny(seed: int = 0, **options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": SIZE, "n_positions": LENGTH, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **options}))


def settings(**options: Any) -> TrainerSettings:
    usual = {"steps": 24, "learning_rate": 1e-2, "log_every": 3, "evaluate_every": 12, "save_every": 5}
    return TrainerSettings(**{**usual, **options})


def run(out: Path | None = None, *, resume: bool = False, **options: Any) -> tuple[GPT2LMHeadModel, Result]:
    model = tiny()
    return model, Trainer(model, Counting(), settings(**options), out=out, resume=resume).train()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Bit for bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


MEASURED = {"tokens_per_second", "memory_mb"}
"""What no two runs have alike."""


def without_times(history: Iterable[Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in MEASURED} for record in history]
