"""Publishers that are killed, run out of space or run against each other: what a reader finds is one version."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from bowline.checkpoint.durable import publication
from bowline.checkpoint.durable.publication import publishing

KILLS = int(os.environ.get("BOWLINE_KILLS", "120"))
SECONDS = 300
KEPT = b"kept through every version"

PUBLISHERS = """
import errno, json, os, random, signal, sys, time
from pathlib import Path
from bowline.checkpoint.durable import exchange
from bowline.checkpoint.durable.publication import publishing

place, kills, two_renames = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "two renames"

def refuse(*names):
    time.sleep(0.0005)
    raise OSError(errno.EINVAL, "no exchange here")

def files(version):
    body = f"version {version} ".encode() * 2000
    shards = [f"model-{at:05d}-of-{2 + version % 2:05d}.safetensors" for at in range(1, 3 + version % 2)]
    index = {"version": version, "shards": shards}
    return {"index.json": json.dumps(index).encode(), **{name: name.encode() + body for name in shards}}

def publish(version):
    with publishing(place, lambda name: name.startswith("model") or name == "index.json") as stage:
        for name, content in files(version).items():
            (stage / name).write_bytes(content)

def whole():
    version = json.loads((place / "index.json").read_bytes())["version"]
    found = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    assert found == {**files(version), "README.md": b"kept through every version"}, (version, sorted(found))
    return version

if two_renames:
    exchange.exchange = refuse
place.mkdir()
(place / "README.md").write_bytes(b"kept through every version")
publish(0)
began = time.monotonic()
for version in range(1, 6):
    publish(version)
pace = (time.monotonic() - began) / 5
seen, previous = set(), 0
for kill in range(kills):
    child = os.fork()
    if not child:
        try:
            while True:
                version += 1
                publish(version)
        finally:
            os._exit(1)
    time.sleep(random.uniform(0, 3 * pace))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a publisher failed by itself"
    left = [path.name for path in place.parent.iterdir() if path != place]
    assert len(left) <= 2, left
    if not place.exists():
        assert two_renames
        previous += 1
        publish(version)
    version = whole()
    pace *= 0.9 if version not in seen else 1.2  # whatever else the machine does, kills fall before and after one
    seen.add(version)
publish(version + 1)
assert [path.name for path in place.parent.iterdir()] == [place.name]
print(json.dumps({"seen": len(seen), "previous": previous, "last": whole()}))
"""


@contextmanager
def publishers(place: Path, how: str = "exchange") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PUBLISHERS, str(place), str(KILLS), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def finished(running: subprocess.Popen[str]) -> dict[str, int]:
    output, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    report: dict[str, int] = json.loads(output)
    return report


def of_one_version(index: bytes, shards: list[bytes]) -> int:
    version: int = json.loads(index)["version"]
    names = json.loads(index)["shards"]
    assert shards == [name.encode() + f"version {version} ".encode() * 2000 for name in names], version
    return version


def at(descriptor: int, name: str) -> bytes:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb") as file:
        return file.read()


def read_through(descriptor: int) -> int:
    """One version by the directory that is open, whatever stands at its name by now."""
    index = at(descriptor, "index.json")
    return of_one_version(index, [at(descriptor, name) for name in json.loads(index)["shards"]])


def read_by_path(place: Path) -> int | None:
    """One version by the directory's name, or `None` where another directory has taken it meanwhile."""
    descriptor = os.open(place, os.O_RDONLY)  # held, so that no other directory can be given its number
    try:
        index = (place / "index.json").read_bytes()
        shards = [(place / name).read_bytes() for name in json.loads(index)["shards"]]
        if not os.path.samestat(os.fstat(descriptor), place.stat()):
            return None
        return of_one_version(index, shards)
    finally:
        os.close(descriptor)


def test_at_every_moment_between_kills_the_directory_is_one_whole_version(tmp_path: Path) -> None:
    place = tmp_path / "root" / "model"
    place.parent.mkdir()
    versions: set[int] = set()
    with publishers(place) as running:
        while running.poll() is None and not (place / "index.json").exists():
            pass
        while running.poll() is None:
            descriptor = os.open(place, os.O_RDONLY)  # there is a directory of this name at every moment
            try:
                versions.add(read_through(descriptor))
            except FileNotFoundError:  # replaced, and being emptied: the reader begins again
                assert not os.path.samestat(os.fstat(descriptor), place.stat())
            finally:
                os.close(descriptor)
            try:
                versions.add(read_by_path(place) or 0)
            except FileNotFoundError:  # a shard that the other version does not have
                assert place.is_dir()
        report = finished(running)
    assert report["seen"] > 10
    assert report["previous"] == 0
    assert len(versions) > 10


def test_without_an_exchange_the_old_one_is_whole_under_its_name_or_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "root" / "model"
    place.parent.mkdir()
    with publishers(place, "two renames") as running:
        report = finished(running)
    assert report["seen"] > 10


RIVAL = """
import sys
from pathlib import Path
from bowline.checkpoint.durable.publication import publishing
place, name = Path(sys.argv[1]), sys.argv[2]
if sys.argv[3] == "two renames":
    import errno
    from bowline.checkpoint.durable import exchange
    def refuse(*names):
        raise OSError(errno.EINVAL, "no exchange here")
    exchange.exchange = refuse
for at in range(60):
    with publishing(place, lambda file: file.endswith(".safetensors")) as stage:
        for part in "ab":
            (stage / f"{name}-{part}.safetensors").write_text(f"{name} {at}")
        (stage / "config.json").write_text(f"{name} {at}")
"""


@pytest.mark.parametrize("how", ["exchange", "two renames"])
def test_of_publishers_at_one_time_one_wins_and_its_files_are_all_its_own(tmp_path: Path, how: str) -> None:
    place = tmp_path / "root" / "model"
    place.mkdir(parents=True)
    (place / "README.md").write_bytes(KEPT)
    commands = [[sys.executable, "-c", RIVAL, str(place), name, how] for name in ("one", "two", "three")]
    rivals = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for rival in rivals:
        _, errors = rival.communicate(timeout=SECONDS)
        assert rival.returncode == 0, errors
    name = (place / "config.json").read_text().split()[0]
    found = {path.name: path.read_bytes() for path in place.iterdir()}
    last = f"{name} 59".encode()
    assert found == {
        "README.md": KEPT,
        "config.json": last,
        f"{name}-a.safetensors": last,
        f"{name}-b.safetensors": last,
    }
    with publishing(place, lambda name: False):
        pass
    assert [path.name for path in place.parent.iterdir()] == ["model"]


FULL = """
import resource, sys
from pathlib import Path
from bowline.checkpoint.durable.publication import publishing
from bowline.checkpoint.durable.shards import Payload, write_shards
from bowline.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
large = Payload(name="t", dtype="U8", shape=(3 << 20,), data=lambda: bytes(3 << 20))
small = Payload(name="s", dtype="U8", shape=(1 << 19,), data=lambda: bytes(1 << 19))
try:
    with publishing(Path(sys.argv[1]), lambda name: True) as stage:
        if sys.argv[2] == "shards":
            write_shards(stage, [small, large], max_shard_size="1MB")
        else:
            (stage / "model.safetensors").write_bytes(bytes(3 << 20))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("how", ["shards", "file"])
def test_a_file_that_the_system_cuts_off_leaves_the_old_version_whole(tmp_path: Path, how: str) -> None:
    place = tmp_path / "model"
    place.mkdir()
    old = {f"model-{at}": random.Random(at).randbytes(1000) for at in range(3)}
    for name, content in old.items():
        (place / name).write_bytes(content)
    command = [sys.executable, "-c", FULL, str(place), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "cannot be written: File too large (help: free space" in done.stdout
    assert {path.name: path.read_bytes() for path in place.iterdir()} == old
    assert list(tmp_path.iterdir()) == [place]


def test_a_publisher_that_comes_between_the_two_renames_of_another_waits_and_keeps_what_is_kept(tmp_path: Path) -> None:
    place, previous = tmp_path / "model", tmp_path / ".model.1-00000000.previous"
    previous.mkdir()
    (previous / "README.md").write_bytes(KEPT)
    held = os.open(previous, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)  # its publisher is at work

    def second_rename() -> None:
        previous.rename(place)

    other = threading.Timer(0.1, second_rename)
    other.start()
    with publishing(place, lambda name: False) as stage:
        (stage / "config.json").write_text("{}")
    other.join()
    os.close(held)
    assert {path.name for path in place.iterdir()} == {"README.md", "config.json"}
    assert (place / "README.md").read_bytes() == KEPT


def test_one_that_does_not_come_back_is_not_waited_for_for_ever_and_the_old_one_stays_whole(tmp_path: Path) -> None:
    """As on a file system without locks, where nobody can tell a publisher that was killed from one that is slow."""
    place, previous = tmp_path / "model", tmp_path / ".model.1-00000000.previous"
    previous.mkdir()
    (previous / "README.md").write_bytes(KEPT)
    held = os.open(previous, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    with patch.object(publication, "PATIENCE", 0.1), publishing(place, lambda name: False) as stage:
        (stage / "config.json").write_text("{}")
    os.close(held)
    assert [path.name for path in place.iterdir()] == ["config.json"]
    assert (previous / "README.md").read_bytes() == KEPT
