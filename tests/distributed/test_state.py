"""State of sharded models: from and to a Hub-style directory, and through DCP onto another number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bowline.auditing import audit
from bowline.nn import load_checkpoint, save_checkpoint
from tests.distributed.models import BATCHES, MODELS, built
from tests.distributed.state_worker import NAMES, ROWS, WIDTH
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
WORKER = "tests.distributed.state_worker"


def other(name: str) -> torch.nn.Module:
    torch.manual_seed(5)
    return MODELS[name]()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("state")
    for name in NAMES:
        save_checkpoint(other(name), out / "whole" / name)
    (out / "large").mkdir()
    save_file({"weight": torch.zeros(ROWS, WIDTH)}, out / "large" / "model.safetensors")
    (out / "a file").write_text("")
    under_torchrun(WORKER, str(out), "all")
    return out


@pytest.fixture(scope="module")
def processes(place: Path) -> list[dict[str, Any]]:
    return [torch.load(place / f"all-2-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_checkpoint_is_loaded_into_shards(name: str, on_meta: bool, processes: list[dict[str, Any]]) -> None:
    expected = other(name).state_dict()
    for process in processes:
        found = process["loaded"][name][on_meta]
        assert found["holds"]
        assert all(torch.equal(value, expected[key]) for key, value in found["parameters"].items())


def test_each_process_reads_its_own_rows(processes: list[dict[str, Any]]) -> None:
    table = ROWS * WIDTH * 4
    for process in processes:
        assert 0.5 * table <= process["read"] < 0.55 * table


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_saved_as_a_checkpoint_for_everybody(
    name: str, place: Path, processes: list[dict[str, Any]]
) -> None:
    saved = place / "saved" / name
    assert processes[0]["saved"][name] == processes[1]["saved"][name]
    assert "model.safetensors.index.json" in processes[0]["saved"][name]
    assert json.loads((saved / "config.json").read_text())["architectures"] == [type(other(name)).__name__]
    again: Any = other(name).double()
    load_checkpoint(again, saved)
    expected: Any = built(name)
    logits = [model.eval()(input_ids=BATCHES[0], labels=BATCHES[0]).logits for model in (again, expected)]
    assert torch.equal(*logits)
    report = audit(saved)
    assert not [finding for finding in report.findings if finding.severity == "error"], report


def test_an_error_of_the_process_that_writes_is_everybodys(processes: list[dict[str, Any]]) -> None:
    seen = [process["saved"]["refused"] for process in processes]
    assert "a file" in seen[0]
    assert "process 0 could not write" in seen[1] and "a file" in seen[1]


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.distributed)])
def test_a_resumed_run_goes_on_on_another_number_of_processes(
    count: int, place: Path, processes: list[dict[str, Any]]
) -> None:
    under_torchrun(WORKER, str(place), "resume", processes=count)
    found = torch.load(place / f"resume-{count}-0.pt")["dcp"]
    for name in ("gpt2", "t5", "llama"):
        assert found[f"{name} holds"]
        assert found[name] == pytest.approx(processes[0]["dcp"][name], rel=1e-6)


def test_an_untied_checkpoint_is_refused_by_a_tied_model(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert "ties.lm_head.weight <- transformer.wte.weight" in process["untied"]["refused"]
        assert process["untied"]["unchanged"]


def test_tied_to_untied_and_back_nothing_is_lost_silently(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        found = process["and back"]
        assert "lm_head.weight: not in the state" in found["tied"]
        assert found["equal"]
        assert "the state has two different ones" in found["apart"]
        assert found["head"]
        assert found["holds"]
