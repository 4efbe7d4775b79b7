"""A process that dies during a save of a sharded model: the other one says so, and what is on disk is one version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
ROOT = Path(__file__).parents[2]
TIMEOUT = 10.0
MANY = pytest.mark.distributed


def killed(*options: str) -> list[dict[str, Any]]:
    """What became of each kill; a directory that is no whole version fails the run."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.save_kill_loop", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rounds"]
    return rounds


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=MANY)])
def test_the_directory_is_one_version_and_the_other_process_says_what_happened(kills: int) -> None:
    rounds = killed("--way", "directory", "--kills", str(kills), "--timeout", str(TIMEOUT))
    assert len(rounds) == kills
    for each in rounds:
        assert each["code"] == 3 and each["seconds"] < TIMEOUT
        assert each["error"].startswith("CheckpointError: ")
        assert "a process ended, or took longer than the group's timeout" in each["error"]


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=MANY)])
def test_a_distributed_checkpoint_is_whole_or_refused(kills: int) -> None:
    rounds = killed("--way", "dcp", "--kills", str(kills), "--timeout", str(TIMEOUT))
    assert len(rounds) == kills
    for each in rounds:
        assert each["code"] == 3 and each["seconds"] < TIMEOUT
        assert all("metadata" in said for said in each["refused"])


@pytest.mark.parametrize("way", ["directory", "dcp"])
@MANY
def test_a_process_that_goes_silent_is_noticed_after_the_timeout(way: str) -> None:
    for each in killed("--way", way, "--kills", "4", "--timeout", "4", "--stop"):
        assert each["code"] == 3 and each["seconds"] < 4 + 1
