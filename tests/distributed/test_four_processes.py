"""On four processes as on one: FSDP2, DDP and tensor parallelism, and a checkpoint that goes on on fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import FAMILIES, MODELS, RATE, built, trained
from tests.torchrun import under_torchrun

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
]
NEAR = 1e-5
RUNS = [
    *(("fsdp", name) for name in MODELS),
    *(("ddp", name) for name in FAMILIES),
    *(("tp", name) for name in MODELS),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four processes")
    under_torchrun("tests.distributed.four_processes_worker", str(out), processes=4)
    return out


@pytest.fixture(scope="module")
def processes(place: Path) -> list[dict[str, Any]]:
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize(("scheme", "name"), RUNS)
def test_ten_steps_are_those_of_one_process(scheme: str, name: str, processes: list[dict[str, Any]]) -> None:
    model = built(name)
    losses = [float(loss) for loss in trained(model, torch.optim.AdamW(model.parameters(), lr=RATE))]
    wanted = model.state_dict()
    for found in processes:
        assert found[scheme][name]["losses"] == pytest.approx(losses, abs=NEAR)
        for key, parameter in found[scheme][name]["parameters"].items():
            torch.testing.assert_close(parameter, wanted[key], rtol=0, atol=NEAR)


@pytest.mark.parametrize("count", [1, 2])
def test_a_distributed_checkpoint_goes_on_on_fewer_processes(
    count: int, place: Path, processes: list[dict[str, Any]]
) -> None:
    under_torchrun("tests.distributed.state_worker", str(place), "resume", processes=count)
    found = torch.load(place / f"resume-{count}-0.pt")["dcp"]
    for name in ("gpt2", "t5", "llama"):
        assert found[f"{name} holds"]
        assert found[name] == pytest.approx(processes[0]["dcp"][name], rel=1e-6)
