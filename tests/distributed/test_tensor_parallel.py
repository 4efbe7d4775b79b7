"""Tensor parallelism, two processes on gloo: the tie is one parameter that is split by its rows, as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.distributed import tensor_parallel_plan
from bowline.errors import TieError
from bowline.nn import load_checkpoint
from tests.distributed.models import RATE, TENSOR_PARALLEL, built, trained
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
NEAR = 1e-5
ENDS = {
    "gpt2": {"lm_head.weight", "transformer.wte.weight"},
    "bert": {"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
    "llama": {"lm_head.weight", "model.embed_tokens.weight"},
}
LAYERS = {"gpt2": 8, "transformers gpt2": 8, "bert": 24, "opt": 8, "llama": 14, "gemma3": 14, "llama with one head": 6}
"""Tensors of the layers that are DTensors: GPT-2's, BERT's and OPT's biases too."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tensor parallel")
    under_torchrun("tests.distributed.tensor_parallel_worker", str(out))
    return out


@pytest.fixture(scope="module")
def processes(place: Path) -> list[dict[str, Any]]:
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_ten_steps_are_those_of_one_process(name: str, processes: list[dict[str, Any]]) -> None:
    model = built(name)
    losses = [float(loss) for loss in trained(model, torch.optim.AdamW(model.parameters(), lr=RATE))]
    for found in processes:
        assert found[name]["losses"] == pytest.approx(losses, abs=NEAR)
        assert found[name]["full logits"] == 0
        for key, parameter in model.state_dict(keep_vars=True).items():
            if isinstance(parameter, torch.nn.Parameter):
                torch.testing.assert_close(found[name]["parameters"][key], parameter.detach(), rtol=0, atol=NEAR)
    first, second = (found[name]["parameters"] for found in processes)
    assert all(torch.equal(first[key], second[key]) for key in first), "every process has the same numbers"


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_the_tie_is_one_parameter_split_by_its_rows(name: str, processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert found[name]["holds"]
        assert "SHARED\n  note: both ends are Shard(dim=0) on 2 processes" in found[name]["report"]
        assert ENDS.get(name, set()) <= set(found[name]["split"])


@pytest.mark.parametrize(("name", "count"), LAYERS.items())
def test_the_layers_are_split_too_where_that_is_known(name: str, count: int, processes: list[dict[str, Any]]) -> None:
    assert len(processes[0][name]["split"]) - 2 == count


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_it_is_saved_for_everybody_and_loaded_again(name: str, place: Path, processes: list[dict[str, Any]]) -> None:
    assert all(found[name]["loaded"] for found in processes)
    again = built(name)
    load_checkpoint(again, place / "saved" / name)
    for key, value in again.named_parameters():
        assert torch.equal(value.detach(), processes[0][name]["parameters"][key])
    report = audit(place / "saved" / name)
    assert not [finding for finding in report.findings if finding.severity == "error"], report


def test_torch_alone_makes_two_matrices(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert not found["torch alone"]["holds"]
        assert "lm_head.weight <- model.embed_tokens.weight EQUAL" in found["torch alone"]["report"]
        assert "DIVERGED" in found["torch alone"]["after"]


def test_bad_input_is_refused_on_every_process(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert "mesh has 2 dimensions, expected one" in found["refusals"]["grid"]
        assert "lm_head.weight <- transformer.wte.weight EQUAL" in found["refusals"]["untied"]


def test_a_style_that_torch_does_not_have_is_refused() -> None:
    model: Any = built("llama")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(TieError, match="has the style 'packed_colwise', expected colwise, rowwise"):
        tensor_parallel_plan(model)
