"""Tensor parallelism and FSDP2 together, on a mesh of two dimensions: ten steps are those of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.nn import load_checkpoint
from tests.distributed.models import BATCHES, RATE, built, trained
from tests.distributed.two_dimensions_worker import NAMES, QUICK
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
CASES = [
    *(("1x2", name) for name in QUICK),
    *(pytest.param("2x1", name, marks=pytest.mark.distributed) for name in QUICK),
    *(pytest.param("2x2", name, marks=pytest.mark.distributed) for name in NAMES),
]
"""The sizes of the mesh (dp x tp), and the model."""
BOUND = 1e-5
"""transformers' norms compute in float32."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What a run on a mesh left, started when it is first asked for."""

    @functools.cache
    def of(sizes: str) -> Path:
        out = tmp_path_factory.mktemp(sizes)
        count = math.prod(int(size) for size in sizes.split("x"))
        under_torchrun("tests.distributed.two_dimensions_worker", str(out), sizes, processes=count)
        return out / sizes

    return of


def processes(place: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(place.glob("*.pt"))]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = {}
    for name in NAMES:
        model = built(name)
        losses = [float(loss) for loss in trained(model, torch.optim.AdamW(model.parameters(), lr=RATE))]
        found[name] = {"losses": losses, "parameters": dict(model.named_parameters(remove_duplicate=False))}
    return found


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_ten_steps_are_those_of_one_process(sizes: str, name: str, places: Any, alone: dict[str, Any]) -> None:
    for process in processes(places(sizes)):
        found = process[name]
        assert [float(loss) for loss in found["losses"]] == pytest.approx(alone[name]["losses"], abs=BOUND)
        assert found["holds"]
        for key, value in alone[name]["parameters"].items():
            torch.testing.assert_close(found["parameters"][key], value.detach(), rtol=0, atol=BOUND)


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_the_saved_checkpoint_is_the_model(sizes: str, name: str, places: Any) -> None:
    place = places(sizes)
    trained_on_first = processes(place)[0][name]
    again: Any = built(name)
    load_checkpoint(again, place / "saved" / name)
    for key, value in again.named_parameters(remove_duplicate=False):
        assert torch.equal(value, trained_on_first["parameters"][key])
    assert again(input_ids=BATCHES[0], labels=BATCHES[0]).loss.isfinite()
    assert not [finding for finding in audit(place / "saved" / name).findings if finding.severity == "error"]


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_it_is_loaded_and_resumed_into_both_dimensions(sizes: str, name: str, places: Any) -> None:
    for process in processes(places(sizes)):
        assert process[name]["loaded"]
        assert process[name]["resumed"]


def test_fsdp_before_tensor_parallelism_is_refused(places: Any) -> None:
    for process in processes(places("1x2")):
        assert "lm_head.weight: is Shard(dim=0)" in process["other way round"]
        assert "before fully_shard" in process["other way round"]
