"""The copies of a sharded trainer's model: every process hears of a stale head, also one that has no copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.weight_sync_worker import NAMES
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
HEADS = {"gpt2": "lm_head.weight", "bert": "cls.predictions.decoder.weight"}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("weight_sync")
    under_torchrun("tests.distributed.weight_sync_worker", str(out))
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_was_not_sent_is_stale(name: str, processes: list[dict[str, Any]]) -> None:
    head = HEADS.get(name, "lm_head.weight")
    for process in processes:
        said = process[name]["one end"]
        assert said.startswith(f"TieError: {head} of the copy is stale: ") and "of 51 rows" in said
        assert said.count("is stale") == 1
        assert "send the weights again" in process[name]["before"]


@pytest.mark.parametrize("name", NAMES)
def test_a_process_without_a_copy_hears_of_the_other_ones(name: str, processes: list[dict[str, Any]]) -> None:
    head = HEADS.get(name, "lm_head.weight")
    first, second = (process[name]["one end, on the first process"] for process in processes)
    assert first.startswith(f"TieError: {head} of the copy is stale")
    assert second.startswith(f"TieError: process 0: {head} of the copy is stale")
    first, second = (process[name]["no copy on the first"] for process in processes)
    assert first.startswith("UsageError: copy is a int")
    assert second.startswith("TieError: process 0: copy is a int")


@pytest.mark.parametrize("name", NAMES)
def test_both_ends_sent_is_right(name: str, processes: list[dict[str, Any]]) -> None:
    head = HEADS.get(name, "lm_head.weight")
    for process in processes:
        assert f"{head}: 51 rows equal as torch.bfloat16" in process[name]["both"]
    for case in ("both, on the first process", "after a forward pass"):
        assert f"{head}: 51 rows equal as torch.bfloat16" in processes[0][name][case]
        assert processes[1][name][case] == "no copy on this process"


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_on_some_process_is_expected(name: str, processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert process[name]["none"].startswith("UsageError: copy is None on every process")


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_that_is_split_for_tensor_parallelism_is_gathered(name: str, processes: list[dict[str, Any]]) -> None:
    head = HEADS.get(name, "lm_head.weight")
    for process in processes:
        assert f"{head} of the copy is stale: 51 of 51 rows (100%)" in process[name]["split, one end"]
        assert f"{head}: 51 rows equal as torch.float64" in process[name]["split, both"]
