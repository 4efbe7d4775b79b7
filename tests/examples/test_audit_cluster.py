"""The script for a Dask cluster gives the lines of the queue, also if one of its workers is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.auditing.queue.test_audit_queue import clean, diverged, endless
from tests.torchrun import ROOT

DASK = ROOT / ".peers" / "dask"
CODES = """
import sys
from distributed import Client
with Client(sys.argv[1]) as client:
    client.wait_for_workers(int(sys.argv[2]), timeout=60)
    print(len(client.run(lambda: __import__("bowline").__version__)))
"""
pytestmark = pytest.mark.skipif(not DASK.exists(), reason="dask is not unpacked in .peers/dask: see the Makefile")


def environment(place: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(DASK), str(ROOT / "src")]),
        "DASK_TEMPORARY_DIRECTORY": str(place / "dask"),
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
    }


def cluster(place: Path, *arguments: object, listed: str = "list") -> subprocess.CompletedProcess[str]:
    """A run of the script on the list in `place`, to the file `lines` there."""
    command = [sys.executable, str(ROOT / "examples" / "audit_cluster.py"), str(place / listed)]
    return subprocess.run(
        [*command, "--output-file", str(place / "lines"), *map(str, arguments)],
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def queue(place: Path, *arguments: object) -> list[str]:
    """The lines of the command on the same list, sorted."""
    command = [sys.executable, "-m", "bowline", "audit", "--from-file", str(place / "list"), "--jobs", "2"]
    done = subprocess.run(
        [*command, "--output-format", "jsonl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return sorted(done.stdout.splitlines())


def lines(place: Path) -> list[str]:
    return sorted((place / "lines").read_text().splitlines())


def write_list(place: Path, paths: list[str]) -> None:
    (place / "list").write_text("\n".join(["# what we ship", *paths, ""]))


def some(place: Path, count: int) -> list[str]:
    return [(clean if number % 3 else diverged)(place / f"c{number:02}") for number in range(count)]


def test_the_lines_are_those_of_the_queue(tmp_path: Path) -> None:
    several = tmp_path / "several"  # a directory of several checkpoints, neither of which can be read
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).touch()
    places = [*some(tmp_path, 12), str(several), str(tmp_path / "missing")]
    write_list(tmp_path, [*places, places[0]])
    done = cluster(tmp_path, "--workers", 2, "--batch", 4)
    assert done.returncode == 2, done.stderr
    assert lines(tmp_path) == queue(tmp_path)
    assert done.stderr == (
        "15 listed, 15 of them audited by this run\n8 clean, 4 with findings, 3 could not be audited\n"
    )


def test_started_again_it_audits_what_is_missing(tmp_path: Path) -> None:
    write_list(tmp_path, some(tmp_path, 6))
    expected = queue(tmp_path)
    (tmp_path / "lines").write_text("\n".join(expected[:4]) + '\n{"path": "cut of')
    done = cluster(tmp_path)
    assert done.returncode == 1
    assert lines(tmp_path) == expected
    assert done.stderr.startswith("6 listed, 2 of them audited by this run\n")


@pytest.mark.pipelines
def test_headers_alone_are_read_if_that_is_asked_for(tmp_path: Path) -> None:
    write_list(tmp_path, some(tmp_path, 3))
    assert cluster(tmp_path, "--headers-only").returncode == 0
    assert lines(tmp_path) == queue(tmp_path, "--headers-only")


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    done = cluster(tmp_path, listed="none")
    assert done.returncode == 2
    assert f"error: {tmp_path / 'none'}: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def running(place: Path, workers: int, **settings: str) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and workers in processes of their own, as on several machines; gives its address and the workers."""
    file = place / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    shared = {"env": {**environment(place), **settings}, "stderr": subprocess.DEVNULL, "start_new_session": True}
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    worker = ["worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    begun = [subprocess.Popen([*dask, *scheduler], **shared)]  # type: ignore[call-overload]
    try:
        begun += [subprocess.Popen([*dask, *worker], **shared) for _ in range(workers)]  # type: ignore[call-overload]
        until = time.monotonic() + 60
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        ready = subprocess.run(
            [sys.executable, "-c", CODES, address, str(workers)],
            env=environment(place),
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
        assert ready.stdout.split() == [str(workers)]
        yield address, begun[1:]
    finally:
        for process in begun:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill_reader(file: Path, workers: list[subprocess.Popen[bytes]]) -> None:
    """Kill the worker that has begun to read a file; its processes have it open, or mapped."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for entry in Path("/proc").iterdir():
            try:
                held = [os.readlink(each) for each in (entry / "fd").iterdir()]  # noqa: PTH115 - a string
                held.append((entry / "maps").read_text())
            except OSError:  # no process, or one that has ended
                continue
            if any(str(file) in each for each in held):
                above = ancestors(int(entry.name))
                os.kill(next(worker.pid for worker in workers if worker.pid in above), signal.SIGKILL)
                return
        time.sleep(0.02)
    raise AssertionError(f"nobody reads {file}")


def ancestors(process: int) -> list[int]:
    """A process, its parent, and so on."""
    found = [process]
    while found[-1] > 1:
        fields = Path(f"/proc/{found[-1]}/stat").read_text().rpartition(")")[2].split()
        found.append(int(fields[1]))
    return found


@pytest.mark.pipelines
@pytest.mark.parametrize("failures", [3, 0], ids=["tried again", "given up"])
def test_a_worker_that_is_killed_costs_no_line_of_others(failures: int, tmp_path: Path) -> None:
    long = Path(endless(tmp_path / "endless"))
    write_list(tmp_path, [str(long), *some(tmp_path, 4)])
    with running(tmp_path, 2, DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=str(failures)) as (address, workers):
        script = [sys.executable, str(ROOT / "examples" / "audit_cluster.py"), str(tmp_path / "list")]
        script += ["--output-file", str(tmp_path / "lines"), "--scheduler", address, "--batch", "1"]
        process = subprocess.Popen(
            [*script, "--time-limit", "5"], env=environment(tmp_path), stderr=subprocess.PIPE, text=True
        )
        kill_reader(long / "model.safetensors", workers)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 2, said
    expected = queue(tmp_path, "--time-limit", "5")
    if failures == 0:
        lost = [line for line in expected if line not in lines(tmp_path)]  # with those that waited for the same worker
        assert str(long) in [json.loads(line)["path"] for line in lost]
        assert said.count("error: 1 not audited, a worker was lost: ") == len(lost)
        assert set(lines(tmp_path)) < set(expected)
        assert cluster(tmp_path, "--time-limit", "5").returncode == 2  # the next run goes on
    assert lines(tmp_path) == expected
