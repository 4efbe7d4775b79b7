"""`save_checkpoint` of models that are on one dimension of a mesh, or on some of the processes: saved, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.nn import load_checkpoint
from tests.distributed.mesh_save_worker import NAME
from tests.distributed.models import built
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.distributed)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mesh_save")
    under_torchrun("tests.distributed.mesh_save_worker", str(out), processes=request.param)
    return out


@pytest.fixture(scope="module")
def processes(place: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(place.glob("*.pt"))]


def is_the_model(saved: Path) -> bool:
    again = built(NAME)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_checkpoint(again, saved)
    return all(torch.equal(one, other) for one, other in zip(again.parameters(), built(NAME).parameters(), strict=True))


def test_a_model_on_one_dimension_of_the_mesh_is_saved_by_the_first_process(
    place: Path, processes: list[dict[str, Any]]
) -> None:
    assert is_the_model(place / "dimension")
    for process in processes:
        assert process["dimension"]["files"] == ("model.safetensors",)
        assert process["dimension"]["loaded"]


def test_a_mesh_of_some_processes_saves_without_the_others(place: Path, processes: list[dict[str, Any]]) -> None:
    assert is_the_model(place / "some")
    upper = processes[len(processes) // 2 :]
    for process in upper:
        assert process["some"]["files"] == ("model.safetensors",)
        assert process["some"]["loaded"]
        assert "lm_head.weight: 51 rows equal as torch.float64" in process["some"]["synced"]
    assert all("some" not in process for process in processes[: len(upper)])


def test_a_grid_of_some_processes_is_refused_on_each_of_them(place: Path, processes: list[dict[str, Any]]) -> None:
    upper = processes[len(processes) // 2 :]
    for process in upper:
        assert "expected a mesh of all processes, or one mesh of one dimension" in process["grid"]["refused"]
        assert f"shape ({len(upper)}, 1), and there are {len(processes)} processes" in process["grid"]["refused"]
    assert not (place / "grid").exists()


def test_a_sync_is_judged_over_all_dimensions_of_the_mesh(processes: list[dict[str, Any]]) -> None:
    last = len(processes) - 1
    for rank, process in enumerate(processes):
        stale, right = process["synced"]
        whose = "" if rank == last else f"process {last}: "
        assert stale.startswith(f"{whose}lm_head.weight of the copy is stale: 1 of 51 rows (2%) differ")
        assert right.startswith("transformer.wte.weight: 51 rows equal" if rank == last else "no copy on this process")
