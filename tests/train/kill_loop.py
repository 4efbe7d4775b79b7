"""Runs that are killed at random moments and resumed until they end: `python -m tests.train.kill_loop --kills 20`.

Each ends with the weights and the log of a run that nobody touched, bit for bit. Children are forked, so a kill falls
anywhere in a run and not in the import of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.train.runs import run, state, without_times

VARIANTS: list[dict[str, Any]] = [
    {"steps": 60, "save_every": 2},
    {"steps": 60, "save_every": 7, "accumulation": 2, "keep": 1},
    {"steps": 60, "save_every": 3, "untie_at_step": 11, "log_every": 4},
]
FINAL = "final.pt"


def train(out: Path, options: dict[str, Any]) -> None:
    """To the end, from wherever the last one was killed."""
    model, result = run(out, resume=True, **options)
    torch.save({"state": state(model), "history": without_times(result.history)}, out / (FINAL + ".tmp"))
    (out / (FINAL + ".tmp")).replace(out / FINAL)


def forked(out: Path, options: dict[str, Any], after: float | None) -> bool:
    """Whether a child that is killed after so many seconds was killed before it was done."""
    child = os.fork()
    if not child:
        code = 1
        try:
            train(out, options)
            code = 0
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status and status != signal.SIGKILL:
        raise SystemExit("a run failed by itself")
    return not (out / FINAL).exists()


def equal(one: Path, other: Path) -> bool:
    """Whether two runs ended alike: weights bit for bit, and every number of every record."""
    mine, theirs = (torch.load(place / FINAL) for place in (one, other))
    weights = mine["state"].keys() == theirs["state"].keys() and all(
        torch.equal(mine["state"][name], theirs["state"][name]) for name in mine["state"]
    )
    return weights and mine["history"] == theirs["history"]


def whole(out: Path) -> list[int]:
    """The checkpoints that are there, each of which can be read."""
    from bowline.train.loop.run_checkpoints import MODEL, Saved, steps_in

    found = steps_in(out / "checkpoints")
    for step in found:
        directory = out / "checkpoints" / f"step-{step:08d}"
        assert Saved(directory).step == step and Saved(directory).tensors(MODEL)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--seed", type=int)
    given = arguments.parse_args()
    chance = random.Random(given.seed)
    torch.set_num_threads(1)
    run(steps=2)  # what torch imports and measures at the first step is there, and the time of a child is its run's
    kills, runs, resumed_at = 0, 0, []
    with tempfile.TemporaryDirectory() as place:
        references = []
        for at, options in enumerate(VARIANTS):
            reference = Path(place, f"reference-{at}")
            began = time.monotonic()
            forked(reference, options, None)
            references.append((reference, options, time.monotonic() - began))
        while kills < given.kills:
            reference, options, seconds = references[runs % len(references)]
            out = Path(place, f"run-{runs}")
            out.mkdir()
            pace, last = seconds / 2, 0
            while forked(out, options, chance.uniform(0, pace)):
                kills += 1
                steps = whole(out)
                pace *= 0.9 if steps and steps[-1] > last else 1.3  # whatever else the machine does, the run gets on
                last = max(steps, default=0)
                resumed_at.append(last)
            if not equal(out, reference):
                raise SystemExit(f"run {runs} ({options}) ended otherwise than one that nobody killed")
            left = [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
            assert left == [], left
            runs += 1
    sys.stdout.write(json.dumps({"kills": kills, "runs": runs, "resumed_at": resumed_at}) + "\n")


if __name__ == "__main__":
    main()
