"""`bowline audit --output-format jsonl`: a line for each place, and a run that is killed goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import GPT2, HEAD, OWN, WTE, table, write

COMMAND = [sys.executable, "-m", "bowline", "audit"]


def bowline(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    made = [tmp_path / f"c{number:02}" for number in range(30)]
    for number, place in enumerate(made):
        write(place, {WTE: table(), **({HEAD: OWN} if number % 3 == 0 else {})}, GPT2)
    return [str(place) for place in made]


def listed(tmp_path: Path, places: list[str]) -> Path:
    (tmp_path / "list").write_text("\n".join(["# what we ship", *places, ""]))
    return tmp_path / "list"


def paths_of(file: Path) -> list[str]:
    return [json.loads(line)["path"] for line in file.read_text().splitlines()]


def test_a_list_is_audited_and_summed_up(places: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    listed(tmp_path, [*places, missing, places[0]])
    done = bowline("--from-file", tmp_path / "list", "--output-format", "jsonl", "--jobs", 2)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(line["path"] for line in lines) == sorted([*places, missing])
    assert [line["path"] for line in lines if line["failures"]] == [missing]
    said = done.stderr.splitlines()
    assert said[0] == "31 audited: 20 clean, 10 with findings, 1 could not be audited"
    assert said[1] == "1 listed more than once"
    assert said[2].split() == ["10", "BW101", "tied-but-diverged"]


def test_killed_and_called_again_it_audits_what_is_missing_once(places: list[str], tmp_path: Path) -> None:
    listed(tmp_path, places)
    out = tmp_path / "results.jsonl"
    arguments = ["--from-file", str(tmp_path / "list"), "--output-format", "jsonl", "--output-file", str(out)]
    killed = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and (not out.exists() or out.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = out.read_bytes().count(b"\n")
    assert 5 <= before < 30
    done = bowline(*arguments)
    assert done.stdout == ""
    assert f"{before} more were in the file already" in done.stderr
    assert sorted(paths_of(out)) == places
    again = bowline(*arguments)
    assert "0 audited" in again.stderr
    assert again.returncode == done.returncode == 1, "what was found before counts too"
    assert sorted(paths_of(out)) == places


def test_a_tree_is_audited_line_by_line(places: list[str], tmp_path: Path) -> None:
    done = bowline(tmp_path, "--recursive", "--output-format", "jsonl", "--ignore", "BW1")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 30


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ([], "Invalid value for PATH...: missing; give a directory, a file, or --from-file LIST"),
        (["x", "--jobs", "2"], "--jobs: is for --output-format jsonl"),
        (["x", "--output-file", "r"], "--output-file: is for --output-format jsonl"),
        (["x", "--output-format", "jsonl", "--fix"], "--fix with --output-format jsonl"),
        (["--from-file", "/no/such/list"], "/no/such/list: cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], seen: str) -> None:
    done = bowline(*arguments)
    assert done.returncode == 2
    assert seen in done.stderr
