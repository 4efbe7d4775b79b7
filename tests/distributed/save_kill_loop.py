"""Two FSDP2 processes that save until one of them is killed: `python -m tests.distributed.save_kill_loop --kills 10`.

After each kill the other process has to end with an error, within the group's timeout, and what is on disk has to be
one whole version: the directory of `save_checkpoint`, and each directory of `dcp.save` that can be loaded. Children are
forked, so a kill falls into a save and not into the import of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bowline.distributed import TiedState, shard_groups
from bowline.nn import load_checkpoint, save_checkpoint
from tests.nn.models import TinyLM, tied

ROWS, WIDTH, LAYERS = 601, 16, 8
LONGEST = 60.0
"""Seconds after which a child ends by itself, should nobody be left to end it."""
ENDED_WITH_AN_ERROR = 3
Save = Callable[[nn.Module, int], object]


@dataclass
class Config:
    version: int
    tie_word_embeddings: bool = True


class Stacked(TinyLM):
    """A model with enough tensors for a kill to fall between two of them."""

    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def at_version(model: nn.Module, version: int) -> None:
    """Every number of the model, and its config, are the version."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(version))
    model.config = Config(version)  # type: ignore[assignment]


def to_directory(place: Path, model: nn.Module, version: int) -> None:
    save_checkpoint(model, place / "model", max_shard_size=("5GB", "20KB", 100)[version % 3])


def to_dcp(place: Path, model: nn.Module, version: int) -> None:
    dcp_save({"state": TiedState(model)}, checkpoint_id=place / f"step-{version}")
    old = place / f"step-{version - 3}"
    if distributed.get_rank() == 0 and old.exists():
        shutil.rmtree(old.rename(place / "removed"))


WAYS = {"directory": to_directory, "dcp": to_dcp}


def saving(rank: int, place: Path, way: str, version: int, timeout: float, saved: int) -> None:
    """Save version after version; say after each that it is saved."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{place / f'store-{version}'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout),
    )
    model = tied(Stacked())
    for group in shard_groups(model):
        fully_shard(group, mesh=init_device_mesh("cpu", (2,)))
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        version += 1
        at_version(model, version)
        WAYS[way](place, model, version)
        os.write(saved, b".")


def forked(rank: int, errors: Path, *arguments: Any) -> int:
    child = os.fork()
    if not child:
        try:
            saving(rank, *arguments)
        except BaseException as error:
            errors.write_text(f"{type(error).__name__}: {error}")
            os._exit(ENDED_WITH_AN_ERROR)
        os._exit(0)
    return child


def ended(child: int, within: float) -> tuple[float, int | None]:
    """The seconds that the child took to end, and its exit code if it ended by itself within the time."""
    began = time.monotonic()
    while time.monotonic() - began < within:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return time.monotonic() - began, os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return within, None


def version_of(model: TinyLM) -> int:
    """The version that every number of the model is."""
    values = {float(value) for each in model.parameters() for value in (each.detach().min(), each.detach().max())}
    assert len(values) == 1, f"a mixture of {values}"
    assert model.head.weight is model.emb.weight
    return int(values.pop())


def in_directory(place: Path) -> tuple[int, list[str]]:
    """The version of the checkpoint, and no refused directories."""
    model = tied(Stacked())
    load_checkpoint(model, place / "model")
    version = version_of(model)
    assert json.loads((place / "model" / "config.json").read_text())["version"] == version
    left = [path.name for path in place.iterdir() if path.name.startswith(".model.")]
    assert len(left) <= 2, left
    return version, []


def in_dcp(place: Path) -> tuple[int, list[str]]:
    """The latest version that can be loaded, and how each directory was refused that cannot."""
    found, refused = [], []
    for step in place.glob("step-*"):
        model = tied(Stacked())
        try:
            dcp_load({"state": TiedState(model)}, checkpoint_id=step)
        except CheckpointException as error:
            refused.append(str(error).strip().splitlines()[-1])
            continue
        version = version_of(model)
        assert step.name == f"step-{version}"
        found.append(version)
    return max(found), refused


READS = {"directory": in_directory, "dcp": in_dcp}


def killed_once(
    place: Path, way: str, version: int, after: float, timeout: float, chance: random.Random, stop: bool
) -> Any:
    """Kill (or stop) one of the processes so many seconds after their first save, and see what becomes of the other."""
    read, write = os.pipe()
    errors = [place / f"error-{rank}" for rank in range(2)]
    children = [forked(rank, errors[rank], place, way, version, timeout, write) for rank in range(2)]
    os.close(write)
    try:
        seen = b""
        while len(seen) < 2 and (byte := os.read(read, 1)):
            seen += byte
        assert len(seen) == 2, "the first save failed: " + " ".join(e.read_text() for e in errors if e.exists())
        began = time.monotonic()
        time.sleep(after)
        dead = chance.randrange(2)
        os.kill(children[dead], signal.SIGSTOP if stop else signal.SIGKILL)
        seconds, code = ended(children[1 - dead], 3 * timeout)
    finally:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
    saves = len(os.read(read, 1 << 16)) // 2
    os.close(read)
    text = errors[1 - dead].read_text() if errors[1 - dead].exists() else ""
    for each in errors:
        each.unlink(missing_ok=True)
    return {
        "dead": dead,
        "seconds": seconds,
        "code": code,
        "error": text,
        "pace": (time.monotonic() - began - seconds) / max(1, saves),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--way", choices=WAYS, default="directory")
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--timeout", type=float, default=10.0)
    arguments.add_argument("--stop", action="store_true", help="stop the process instead, which breaks no connection")
    arguments.add_argument("--seed", type=int)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(given.seed)
    rounds: list[Any] = []
    pace, latest = 0.1, 0
    with tempfile.TemporaryDirectory() as root:
        place = Path(root)
        for kill in range(given.kills):
            first = 1000 * (kill + 1)
            done = killed_once(place, given.way, first, chance.uniform(0, 3 * pace), given.timeout, chance, given.stop)
            pace = done.pop("pace")
            version, refused = READS[given.way](place)
            assert version > first, "the save that was done before the kill is lost"
            rounds.append({**done, "saves": version - first, "version": version, "refused": refused})
            latest = version
            for old in (*place.glob("step-*"), *place.glob("removed")):
                shutil.rmtree(old)
        if given.way == "directory":
            model = tied(Stacked())
            at_version(model, latest + 1)
            save_checkpoint(model, place / "model")
            assert [path.name for path in place.glob(".model*")] == []
    sys.stdout.write(json.dumps({"pace": pace, "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
