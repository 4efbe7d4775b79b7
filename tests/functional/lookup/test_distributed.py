"""Two processes on gloo: the gradient that DDP and FSDP2 reduce is the whole one, and was made in one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.functional.lookup.ends import body, loss_of, near, untied
from tests.functional.lookup.workers import BATCHES, KINDS, Tied, batch
from tests.processes import of_two_processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process, by kind."""
    return of_two_processes("tests.functional.lookup.workers", tmp_path_factory.mktemp("ranks"))


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
