"""Two processes on gloo: the gradient that DDP and FSDP2 reduce is the whole one, and was made in one buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nn.tied_embedding.ends import body, loss_of, near, untied
from tests.nn.tied_embedding.workers import BATCHES, KINDS, Tied, batch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process, by kind."""
    root, place = Path(__file__).parents[3], tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.nn.tied_embedding.workers",
                str(rank),
                str(place / "store"),
                str(place / "out"),
            ],
            cwd=root,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [torch.load(f"{place / 'out'}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_reduce_the_sum_of_both_ends(kind: str, results: list[dict[str, Any]]) -> None:
    weight = Tied().weight
    expected = torch.zeros(weight.shape, dtype=torch.float64)
    for rank in range(2):
        for step in range(BATCHES):
            ids = batch(rank, step)
            expected += untied(lambda lookup, end, ids=ids: loss_of(end(body(lookup(ids)))), weight) / 2  # type: ignore[misc]
    for result in results:
        near(result[kind]["gradient"], expected)
        assert (result[kind]["heads"], result[kind]["dense"]) == (BATCHES, 0)
