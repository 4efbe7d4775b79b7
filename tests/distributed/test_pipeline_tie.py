"""Tied models in pipeline stages, on gloo: with `PipelineTie` they train as on one process, and without they drift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import BATCHES, STEPS
from tests.distributed.pipeline_tie_worker import MAX_NORM, V_RUNS, optimizer_of, tiny
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
NEAR = 1e-5
FOUND = list[dict[str, Any]]
WITH_V = pytest.mark.skipif(not V_RUNS, reason="torch 2.11 cannot run a V schedule on gloo")
V, V_SHARED = (pytest.param(name, marks=WITH_V) for name in ("v", "v shared"))


def collected(out: Path, processes: int) -> FOUND:
    under_torchrun("tests.distributed.pipeline_tie_worker", str(out), processes=processes)
    return [torch.load(out / f"{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> FOUND:
    """What each of two processes found."""
    return collected(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> FOUND:
    return collected(tmp_path_factory.mktemp("four"), 4)


def on_one_process(name: str, *, clips: bool = True, vocabulary: int = 51) -> dict[str, Any]:
    """Ten steps of the whole tied model, clipped by torch's own norm."""
    model = tiny(name, vocabulary)
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for batch in BATCHES:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if clips:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "parameters": {k: v.detach() for k, v in model.state_dict().items()}}


@pytest.fixture(scope="module")
def alone() -> Mapping[str, dict[str, Any]]:
    return {
        "gpt2": on_one_process("gpt2"),
        "bert": on_one_process("bert"),
        "t5": on_one_process("t5"),
        "unclipped": on_one_process("gpt2", clips=False),
    }


def assert_near(found: FOUND, run: str, wanted: dict[str, Any]) -> None:
    """Losses, norms and parameters are those of one process, and the copies were equal to the bit after every step."""
    compared = set()
    for each in found:
        assert each[run]["losses"] == pytest.approx(wanted["losses"], abs=NEAR)
        assert each[run]["norms"] == pytest.approx(wanted["norms"], abs=NEAR)
        assert each[run]["apart"] == [0.0] * STEPS
        for name, parameter in each[run]["parameters"].items():
            (whole,) = {key for key in wanted["parameters"] if key == name or key.endswith(f".{name}")}
            torch.testing.assert_close(parameter, wanted["parameters"][whole], rtol=0, atol=NEAR)
            compared.add(whole)
    left = set(wanted["parameters"]) - compared
    assert all(name == "shared.weight" for name in left), left  # T5's third name for its table


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["gpipe", "1f1b", "interleaved", V, V_SHARED, "bert", "t5"])
def test_ten_steps_are_those_of_one_process(run: str, two: FOUND, alone: Mapping[str, Any]) -> None:
    assert_near(two, run, alone.get(run, alone["gpt2"]))


def test_an_attached_tie_sums_before_each_step(two: FOUND, alone: Mapping[str, Any]) -> None:
    assert_near(two, "attached", alone["unclipped"])


def test_without_it_the_copies_drift_and_the_loss_is_another(two: FOUND, alone: Mapping[str, Any]) -> None:
    wanted = alone["unclipped"]["losses"]
    for found in two:
        losses, apart = found["plain"]["losses"], found["plain"]["apart"]
        assert losses[0] == pytest.approx(wanted[0], abs=NEAR)
        assert max(abs(one - other) for one, other in zip(losses, wanted, strict=True)) > 1e-3
        assert apart[0] > 1e-3
        assert apart[-1] > 5 * apart[0]


@pytest.mark.parametrize("run", ["gpipe", "interleaved", V, "bert", "t5"])
def test_a_norm_that_counts_every_copy_is_too_large(run: str, two: FOUND, alone: Mapping[str, Any]) -> None:
    wanted = alone.get(run, alone["gpt2"])["norms"]
    for found in two:
        assert found[run]["norms"] == pytest.approx(wanted, abs=NEAR)
        assert all(naive > 1.01 * norm for naive, norm in zip(found[run]["naive"], wanted, strict=True))


def test_each_rank_knows_its_copies(two: FOUND) -> None:
    assert [found["interleaved"]["names"] for found in two] == [("wte.weight",), ("lm_head.weight",)]
    assert [found["t5"]["names"] for found in two] == [
        ("encoder.embed_tokens.weight",),
        ("decoder.embed_tokens.weight", "lm_head.weight"),
    ]


@WITH_V
def test_a_rank_may_have_both_copies_and_another_none(two: FOUND) -> None:
    assert [found["v"]["names"] for found in two] == [("wte.weight", "lm_head.weight"), ()]


def test_berts_two_biases_stay_one(two: FOUND) -> None:
    found = two[1]["bert"]["parameters"]
    assert torch.equal(found["predictions.bias"], found["predictions.decoder.bias"])
    assert found["predictions.bias"].abs().max() > 0


# --- refused, on every rank -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", ["lm_head.weight on rank 1 is (10, 4) float32", "wte.weight on rank 0: (9, 4) float32"]),
        ("dtype", ["lm_head.weight on rank 1 is (9, 4) bfloat16", "float32"]),
        ("frozen", ["lm_head.weight on rank 1", "frozen; expected as the source"]),
        ("two sources", ["rank 0 has source=0 and rank 1 has source=1"]),
        ("source outside", ["source=2", "0 to 1"]),
        ("no source", ["source=0 is rank 0, whose stages have no copy", "lm_head.weight on rank 1"]),
        ("misspelt", ["lm_haed.weight: no stage has such a parameter", "lm_head.weight"]),
        ("only one", ["wte.weight on rank 0 is the only copy"]),
        ("no module", ["rank 0: module is a str"]),
        ("no name", ["name=[]"]),
        ("alias", ["rank 1: wte.weight and lm_head.weight are two parameters on the same memory"]),
        ("whole mesh", ["a mesh of 2 dimensions", 'mesh["pp"]']),
        ("no group", ["group is a NoneType"]),
    ],
)
def test_a_tie_that_cannot_be_is_refused_on_every_rank(case: str, words: list[str], two: FOUND) -> None:
    assert two[0]["refusals"][case] == two[1]["refusals"][case]
    assert all(word in two[0]["refusals"][case] for word in words), two[0]["refusals"][case]


def test_a_dimension_of_a_mesh_is_a_group(two: FOUND) -> None:
    assert [found["refusals"]["mesh"] for found in two] == ["", ""]


@WITH_V
def test_one_parameter_in_two_stages_is_refused_because_schedules_scale_it_twice(two: FOUND) -> None:
    for found in two:
        assert "rank 0: wte.weight and lm_head.weight are one parameter in two stages" in found["v shared"]["refused"]


def test_a_second_sum_in_one_step_is_refused(two: FOUND) -> None:
    for found in two:
        twice = found["twice"]
        assert "summed already, expected a new one" in twice["second"]
        assert torch.equal(twice["value"], torch.full((9, 4), 2.0))
        for case in ("more backward", "zeroed in place"):
            assert "summed already, and changed afterwards" in twice[case]
        assert "changed after it was summed" in twice["then clipped"]
        assert torch.equal(twice["next step"], torch.full((9, 4), 2.0))


def test_an_attached_tie_does_not_sum_again(two: FOUND) -> None:
    for found in two:
        twice = found["twice"]
        torch.testing.assert_close(twice["attached and called"], torch.full((9, 4), 0.2))
        assert "clip by tie.clip_grad_norm_" in twice["attached, torch's clip"]
        assert "closure" in twice["closure"]


# --- single calls -----------------------------------------------------------------------------------------------------


def test_a_stage_without_a_gradient_counts_as_zero(two: FOUND) -> None:
    for found in two:
        assert torch.equal(found["single"]["none is zero"], torch.ones(9, 4))


def test_the_check_names_the_rank_whose_copy_differs(two: FOUND) -> None:
    for found in two:
        assert "lm_head.weight on rank 1 differs from the source, wte.weight on rank 0" in found["single"]["differs"]
        assert found["single"]["equal again"] == ""


def test_a_broadcast_after_a_load_reaches_the_new_parameter(two: FOUND) -> None:
    for found in two:
        assert "differs" in found["single"]["after assign"]
        assert torch.equal(found["single"]["loaded"], torch.full((9, 4), 5.0))
        assert torch.equal(found["single"]["grad of the new"], torch.full((9, 4), 2.0))


def test_what_changed_since_is_said(two: FOUND) -> None:
    for found in two:
        assert "is frozen and was trained" in found["single"]["frozen later"]
        assert found["single"]["frozen everywhere"]
        assert "holds no parameter now" in found["single"]["gone"]


def test_a_copy_that_is_gone_on_one_rank_is_an_error_on_both(two: FOUND) -> None:
    for found in two:
        assert len(found["single"]["gone on one rank"]) == 2
        for said in found["single"]["gone on one rank"]:
            assert "rank 1: lm_head.weight: holds no parameter now" in said


def test_clipping_by_the_largest_value_or_several_ties(two: FOUND) -> None:
    """Two ties of 36 and 28 values of 2, each counted once: a norm of 16."""
    for found in two:
        assert found["single"]["largest"] == 6.0
        torch.testing.assert_close(found["single"]["clipped"], torch.ones(9, 4))
        assert found["single"]["two ties"] == 16.0


def test_sparse_and_half_gradients(two: FOUND) -> None:
    wanted = torch.zeros(9, 4)
    wanted[2] = 1.0
    for found in two:
        assert torch.equal(found["single"]["sparse"], wanted)
        assert found["single"]["bfloat16 norm"] == 12.0
        assert found["single"]["bfloat16 norm"].dtype is torch.float32
        assert found["single"]["bfloat16"].dtype is torch.bfloat16


# --- four processes ---------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("run", ["four stages", "fsdp"])
def test_four_processes_are_as_one(run: str, four: FOUND, alone: Mapping[str, Any]) -> None:
    assert_near(four, run, alone["gpt2"])


@pytest.mark.distributed
def test_fsdp_stages_drift_without_it(four: FOUND) -> None:
    assert all(found["fsdp plain"]["apart"][-1] > 5e-3 for found in four)


@pytest.mark.distributed
def test_ends_that_are_sharded_by_rows_are_as_one_process(four: FOUND) -> None:
    assert_near(four, "tensor parallel", on_one_process("gpt2", vocabulary=52))


@pytest.mark.distributed
def test_a_gradient_that_is_placed_otherwise_is_redistributed(four: FOUND) -> None:
    for found in (each["placed otherwise"] for each in four):
        assert found["placement"] == "(Shard(dim=0),)"
        assert torch.equal(found["whole"], found["wanted"])


@pytest.mark.distributed
def test_copies_with_other_parts_of_the_matrix_are_refused(four: FOUND) -> None:
    for found in four:
        assert "Shard(dim=1)" in found["placements"]["axis"]
        assert "Shard(dim=0)" in found["placements"]["axis"]
        assert "whole on this process" in found["placements"]["whole"]


@pytest.mark.distributed
def test_a_stage_that_is_gathered_is_refused_until_it_is_sharded_again(four: FOUND) -> None:
    for found in four:
        assert "is gathered now and was sharded before" in found["gathered"]["refused"]
        assert found["gathered"]["resharded"] == ""
