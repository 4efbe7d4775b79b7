"""Ties under FSDP2 and DDP, two processes on gloo: as on one process, and what goes wrong without is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from bowline.distributed import check_before_sharding, shard_groups
from bowline.errors import TieError, UsageError
from bowline.models import LSTMConfig, LSTMLMHeadModel
from bowline.nn import TieGuard
from tests.distributed.models import FAMILIES, MODELS, RATE, built, trained
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
NEAR = 1e-5
TORCH_IS_SILENT = TorchVersion(torch.__version__) < "2.13"
"""Whether torch itself may say nothing of ends that are wrapped separately: 2.11 says nothing."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    out = tmp_path_factory.mktemp("fsdp")
    under_torchrun("tests.distributed.fsdp_worker", str(out))
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and parameters of each model, trained on one process with the whole batches."""
    found = {}
    for name in MODELS:
        model = built(name)
        losses = [float(loss) for loss in trained(model, torch.optim.AdamW(model.parameters(), lr=RATE))]
        found[name] = (losses, {key: value.detach() for key, value in model.state_dict().items()})
    return found


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "name"), [*(("fsdp", name) for name in MODELS), *(("ddp", name) for name in FAMILIES)]
)
def test_ten_steps_are_those_of_one_process(
    scheme: str, name: str, processes: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    losses, parameters = alone[name]
    for found in processes:
        assert found[scheme][name]["losses"] == pytest.approx(losses, abs=NEAR)
        for key, parameter in found[scheme][name]["parameters"].items():
            torch.testing.assert_close(parameter, parameters[key], rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", MODELS)
def test_the_check_says_how_each_end_is_placed(name: str, processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert found["fsdp"][name]["holds"]
        assert "SHARED\n  note: both ends are Shard(dim=0) on 2 processes" in found["fsdp"][name]["report"]


def test_the_rows_do_not_divide_evenly(processes: list[dict[str, Any]]) -> None:
    assert [found["local"]["rows"] for found in processes] == [26, 25]


# --- silently wrong, and found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["tied afterwards", "transformers"])
def test_tied_after_sharding_the_training_is_another(
    wrong: str, processes: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for found in processes:
        losses = found[wrong]["losses"]
        assert losses[0] == pytest.approx(alone["llama"][0][0], abs=NEAR), "the first step is right"
        assert abs(losses[1] - alone["llama"][0][1]) > 1e-4, "the second is not, and torch says nothing"
        assert not found[wrong]["holds"]
        assert (
            "fully_shard keeps lm_head.weight and model.embed_tokens.weight as two parameters" in found[wrong]["report"]
        )


def test_transformers_own_path_is_refused_before(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "51 rows do not divide by 2" in found["transformers"]["refused"]


def test_transformers_own_stages_drift_apart_and_pipeline_tie_keeps_them(processes: list[dict[str, Any]]) -> None:
    first, last = (found["stages"] for found in processes)
    assert first["loss"] is last["loss"] is None, "labels are ignored"
    assert (first["alone"] - last["alone"]).abs().max() > 1e-3
    assert torch.equal(first["tied"], last["tied"])
    for found in (first, last):
        assert "DistributedConfig(pp_size=2) gives the last stage a copy of the matrix" in found["refused"]
        assert 'bowline.PipelineTie(model, "model.embed_tokens.weight", mesh)' in found["refused"]


def test_separate_wrapping_is_refused_before_the_first_forward(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "its ends are in two groups, expected one" in found["wrapped apart"]["refused"]
        plain = found["wrapped apart"]["plain"]
        assert plain.startswith("ValueError") or (TORCH_IS_SILENT and plain == "")


def test_an_alias_would_be_untied(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "ALIAS (help: bowline.tie_weights(model), before it is sharded)" in found["alias"]["refused"]
        assert found["alias"]["apart"] > 1e-3, "torch makes two matrices of it"


def test_an_optimizer_built_too_early_trains_nothing(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "that sharding replaces, so its steps would have no effect" in found["early optimizer"]["refused"]
        assert found["early optimizer"]["still"]
        assert "parameters that the model does not have" in found["early optimizer"]["now"]


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("untied", "processes 0 and 1 disagree about their ties: lm_head.weight <- transformer.wte.weight (51, 16)"),
        ("shapes", "lm_head.weight <- transformer.wte.weight (49, 16)"),
        ("one sided", "lm_head.weight <- transformer.wte.weight EQUAL"),
    ],
)
def test_processes_that_disagree_all_hear_of_it(what: str, seen: str, processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert seen in found["disagreements"][what]


def test_the_guard_of_a_group_hears_what_happened_on_another_process(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "lm_head.weight <- transformer.wte.weight differs between the processes" in found["guards"]["drifted"]
        assert found["guards"]["broken"]
    assert "is broken on some process" in processes[0]["guards"]["broken"]


# --- without processes ------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two layers that share a matrix, beside one that shares none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.layers[1][0].weight = self.layers[0][0].weight  # type: ignore[index]


def test_layers_that_share_a_parameter_go_to_the_models_group() -> None:
    model = Shared()
    assert shard_groups(model) == [[model.layers[2]], [model]]


def test_a_model_without_layers_is_one_group() -> None:
    model = LSTMLMHeadModel(LSTMConfig(vocab_size=9, hidden_size=4, num_layers=1))
    assert shard_groups(model) == [[model]]


def test_t5s_position_biases_are_groups_of_their_own() -> None:
    model: Any = built("t5")
    tables = [
        block.layer[0].SelfAttention.relative_attention_bias
        for block in (model.encoder.block[0], model.decoder.block[0])
    ]
    assert shard_groups(model)[:2] == [[table] for table in tables]


class Style:
    """As torch's `ColwiseParallel` and `RowwiseParallel`, which a plan holds: only the class's name counts."""


class ColwiseParallel(Style):
    pass


class RowwiseParallel(Style):
    pass


@pytest.mark.parametrize(
    ("plan", "seen"),
    [
        ({"lm_head": ColwiseParallel()}, "shards lm_head.weight by its rows and leaves transformer.wte.weight whole"),
        (
            {"lm_head": ColwiseParallel(), "transformer.wte": ColwiseParallel()},
            "shards lm_head.weight by its rows and shards transformer.wte.weight by its columns, expected the same",
        ),
        ({"lm_head": "colwise_gather_output"}, "leaves transformer.wte.weight whole"),
        ({"transformer.head": ColwiseParallel()}, "plan['transformer.head']: GPT2LMHeadModel has no such module"),
    ],
)
def test_a_plan_that_treats_the_ends_differently_is_refused(plan: dict[str, Any], seen: str) -> None:
    with pytest.raises(TieError) as error:
        check_before_sharding(built("gpt2"), plan)
    assert seen in str(error.value) and "bowline.tensor_parallel_plan(model)" in str(error.value)


def test_a_plan_that_shards_both_ends_by_rows_is_not() -> None:
    plan = {"lm_head": ColwiseParallel(), "transformer.wte": RowwiseParallel(), "transformer.h.*.mlp": Style()}
    check_before_sharding(built("gpt2"), plan)


def test_fewer_rows_than_processes_are_refused() -> None:
    class Mesh:
        shape, mesh_dim_names = (64,), ("data",)

    with pytest.raises(TieError, match=r"transformer.wte.weight: has 51 rows for 64 processes"):
        check_before_sharding(built("gpt2"), Mesh())


def test_a_stranger_in_a_group_and_another_argument_are_refused() -> None:
    with pytest.raises(TieError, match="group 0 has a Linear that is not in the model"):
        check_before_sharding(built("gpt2"), [nn.Linear(1, 1)])
    with pytest.raises(UsageError, match="plan_or_mesh is a int, expected a DeviceMesh"):
        check_before_sharding(built("gpt2"), 2)
    with pytest.raises(UsageError, match=r"group is a str, expected a torch\.distributed\.ProcessGroup"):
        TieGuard(built("gpt2"), group="world")  # type: ignore[arg-type]
