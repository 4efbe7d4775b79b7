"""Trainers that are killed or run out of space while they save: the directory loads, and is one whole version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bowline.errors import CheckpointError
from bowline.nn import load_checkpoint, save_checkpoint
from tests.nn.models import TinyLM, tied

KILLS = int(os.environ.get("BOWLINE_KILLS", "120")) // 3
SECONDS = 300
ROWS, WIDTH = 600, 16

TRAINER = """
import json, os, random, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
import torch
from bowline.nn import load_checkpoint, save_checkpoint
from tests.nn.models import TinyLM, tied

place, kills = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

@dataclass
class Config:
    version: int
    tie_word_embeddings: bool = True

model = tied(TinyLM(600, 16))

def save(version):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(version))
    model.config = Config(version)
    save_checkpoint(model, place, max_shard_size=("5GB", "20KB", 100)[version % 3])

save(0)
load_checkpoint(model, place)  # each version is written over the files that the model is mapped from
began = time.monotonic()
for version in range(1, 4):
    save(version)
pace = (time.monotonic() - began) / 3
seen = set()
for kill in range(kills):
    child = os.fork()
    if not child:
        try:
            while True:
                version += 1
                save(version)
        finally:
            os._exit(1)
    time.sleep(random.uniform(0, 3 * pace))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a save failed by itself"
    left = [path.name for path in place.parent.iterdir() if path != place]
    assert len(left) <= 2, left
    fresh = tied(TinyLM(600, 16))
    assert load_checkpoint(fresh, place)
    version = json.loads((place / "config.json").read_text())["version"]
    assert all((parameter == version).all() for parameter in fresh.parameters()), version
    assert fresh.head.weight is fresh.emb.weight
    pace *= 0.9 if version not in seen else 1.2  # whatever else the machine does, kills fall before and after a save
    seen.add(version)
save(version + 1)
assert [path.name for path in place.parent.iterdir()] == [place.name]
print(json.dumps({"seen": len(seen), "last": version + 1}))
"""


@contextmanager
def trainer(place: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TRAINER, str(place), str(KILLS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def test_whenever_a_saving_trainer_is_killed_the_directory_loads_as_one_version(tmp_path: Path) -> None:
    place = tmp_path / "root" / "model"
    place.parent.mkdir()
    loaded: set[int] = set()
    began = time.monotonic()
    with trainer(place) as running:
        while running.poll() is None and not (place / "config.json").exists() and time.monotonic() - began < SECONDS:
            time.sleep(0.01)
        while running.poll() is None:  # a reader meanwhile, who may have to begin again but never mixes two
            model = tied(TinyLM(ROWS, WIDTH))
            try:
                load_checkpoint(model, place)
            except CheckpointError:  # its files were replaced while it read, and it says so
                continue
            values = {value.item() for parameter in model.parameters() for value in (parameter.min(), parameter.max())}
            assert len(values) == 1, values
            loaded.add(int(values.pop()))
        output, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    report = json.loads(output)
    assert report["seen"] > KILLS // 12
    assert len(loaded) > 2
    model = tied(TinyLM(ROWS, WIDTH))
    assert load_checkpoint(model, place)
    assert (model.head.weight == report["last"]).all()


FULL = """
import resource, sys
from bowline.errors import CheckpointError
from bowline.nn import save_checkpoint
from tests.nn.models import TinyLM, tied
model = tied(TinyLM(1 << 13, 64, seed=2))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    save_checkpoint(model, sys.argv[1], max_shard_size=sys.argv[2])
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_a_save_that_finds_no_room_leaves_the_old_checkpoint_whole(tmp_path: Path, size: str) -> None:
    place = tmp_path / "model"
    save_checkpoint(tied(TinyLM(seed=1)), place, max_shard_size=100)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    command = [sys.executable, "-c", FULL, str(place), size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot be written: File too large (help: free space" in done.stdout
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert list(tmp_path.iterdir()) == [place]
    model = tied(TinyLM())
    assert load_checkpoint(model, place)
    assert torch.equal(model.head.weight, TinyLM(seed=1).emb.weight)
