"""Audits of many places: one process for each, so that one that hangs or dies costs its own result alone."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from bowline.auditing.queue.audit_queue import PlaceResult, audited
from bowline.auditing.report.json_format import render_line
from tests.checkpoints import GPT2, HEAD, OWN, WTE, table, write

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "audit.schema.json").read_text())
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


def clean(place: Path) -> str:
    write(place, {WTE: table()}, GPT2)
    return str(place)


def diverged(place: Path) -> str:
    write(place, {WTE: table(), HEAD: OWN}, GPT2)
    return str(place)


def endless(place: Path) -> str:
    """A sparse table of 64 GB, which takes minutes to read and no space."""
    place.mkdir()
    rows, width = 2**21, 2**13
    header = json.dumps({WTE: {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}}).encode()
    with (place / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * rows * width)
    (place / "config.json").write_text(json.dumps({**GPT2, "vocab_size": rows, "n_embd": width}))
    return str(place)


def run(places: list[str], *, jobs: int = 1, time_limit: float = 60.0) -> dict[str, PlaceResult]:
    found = list(audited(places, jobs=jobs, time_limit=time_limit, options={}))
    assert len(found) == len(places)
    return {outcome.path: outcome for outcome in found}


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_place_has_its_outcome(jobs: int, tmp_path: Path) -> None:
    good, bad, none = clean(tmp_path / "a"), diverged(tmp_path / "b"), str(tmp_path / "none")
    found = run([good, bad, none], jobs=jobs)
    assert {path: outcome.code for path, outcome in found.items()} == {good: 0, bad: 1, none: 2}
    assert found[bad].codes >= {"BW101"}
    assert "none" in found[none].record["failures"][0]["message"]
    for path, outcome in found.items():
        line = json.loads(render_line(path, outcome.record))
        assert line["path"] == path
        Draft202012Validator(SCHEMA).validate(line)


def test_one_that_takes_too_long_is_stopped_and_the_rest_goes_on(tmp_path: Path) -> None:
    places = [endless(tmp_path / "endless"), *(clean(tmp_path / f"c{at}") for at in range(3))]
    began = time.monotonic()
    found = run(places, time_limit=2.0)
    assert time.monotonic() - began < 20
    assert [found[path].code for path in places] == [2, 0, 0, 0]
    assert "took more than 2 s, and was stopped" in found[places[0]].record["failures"][0]["message"]


def children_that_audit() -> Iterator[int]:
    """The processes that this one's workers have forked."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    workers = {pid for pid, parent in parents.items() if parent == os.getpid()}
    yield from (pid for pid, parent in parents.items() if parent in workers)


@needs_proc
@pytest.mark.parametrize("whom", ["the audit", "its worker"])
def test_a_process_that_is_killed_costs_one_result(whom: str, tmp_path: Path) -> None:
    places = [endless(tmp_path / "endless"), clean(tmp_path / "after")]

    def kill() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for pid in list(children_that_audit()):
                time.sleep(0.3)
                parent = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
                if whom == "its worker":
                    os.kill(parent, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(places)
    killer.join()
    assert [found[path].code for path in places] == [2, 0]
    message = found[places[0]].record["failures"][0]["message"]
    assert ("ended by signal 9" if whom == "the audit" else "ended without a result") in message


def groups_that_audit(place: str) -> set[int]:
    """The process groups of which a process has a file below `place` open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                opened = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(name.startswith(place) for name in opened):
                found.add(os.getpgid(int(entry.name)))
    return found


@needs_proc
def test_no_audit_outlives_a_caller_that_was_killed(tmp_path: Path) -> None:
    place = endless(tmp_path / "endless")
    code = f"""
from bowline.auditing.queue.audit_queue import audited
list(audited([{place!r}], jobs=1, time_limit=600.0, options={{}}))
"""
    caller = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 30
    while not (groups := groups_that_audit(place)) and time.monotonic() < until:
        time.sleep(0.05)
    assert groups
    caller.kill()
    caller.wait()
    until = time.monotonic() + 10
    while (left := groups_that_audit(place)) and time.monotonic() < until:
        time.sleep(0.1)
    for group in left:
        os.killpg(group, signal.SIGKILL)
    assert not left
