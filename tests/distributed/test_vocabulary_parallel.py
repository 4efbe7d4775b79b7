"""A tied matrix split by its rows over two processes on gloo: loss, lookup and gradients are those of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.logits import linear_logits
from tests.distributed.models import built
from tests.distributed.vocabulary_parallel_worker import (
    FIRST,
    IDS,
    LEAD,
    OPTIONS,
    PADDINGS,
    PLANS,
    SIZES,
    WIDTH,
    arguments,
    results,
)
from tests.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
POSITIONS = LEAD[0] * LEAD[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocabulary-parallel")
    under_torchrun("tests.distributed.vocabulary_parallel_worker", str(out))
    return out


@pytest.fixture(scope="module")
def processes(place: Path) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return [torch.load(place / f"{rank}.pt") for rank in range(2)]


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_one_process(size: int, name: str, processes: list[dict[str, Any]]) -> None:
    hidden, weight, labels, options = arguments(size, name)
    options = {key: one.double() if isinstance(one, torch.Tensor) else one for key, one in options.items()}
    expected = results(hidden.double(), weight.double(), labels, {**options, "backend": "reference"})
    for process in processes:
        found = process["losses"][size, name]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), other, **NEAR)


def test_a_compiled_function_gives_the_same(processes: list[dict[str, Any]]) -> None:
    """The loss runs outside the graph: inside it, hidden states would get one process's part of their gradient."""
    for process in processes:
        for one, other in zip(process["compiled"], process["losses"][51, "plain"], strict=True):
            torch.testing.assert_close(one, other, **NEAR)


def test_without_positions_loss_and_gradient_are_0(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert not any(one.any() for one in process["without positions"])


def test_every_process_has_its_share_of_the_rows(processes: list[dict[str, Any]]) -> None:
    assert [process["rows"] for process in processes] == [FIRST, 51 - FIRST]
    assert {process["backend"] for process in processes} == {"logits"}


def test_logits_alone_are_split_and_have_every_option(processes: list[dict[str, Any]]) -> None:
    hidden, weight, _, _ = arguments(51, "plain")
    hidden.requires_grad_()
    bias = torch.linspace(-1, 1, 51, requires_grad=True)
    logits = linear_logits(hidden, weight, bias=bias, logit_scale=0.5, softcap=2.0, mask_ids=[1, 40])
    logits.masked_fill(logits.isinf(), 0.0).square().sum().backward()
    for found in processes:
        for seen, wanted in zip(found["logits"], (logits.detach(), hidden.grad, bias.grad), strict=True):
            torch.testing.assert_close(seen, wanted)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_model_that_is_split_gives_logits_without_labels(name: str, processes: list[dict[str, Any]]) -> None:
    for found in processes:
        torch.testing.assert_close(*found["families"][name])


def test_the_forward_pass_sends_three_numbers_a_position_whatever_the_vocabulary(
    processes: list[dict[str, Any]],
) -> None:
    """And two of eight bytes, which tell whether the labels are the same everywhere."""
    for process in processes:
        for sent in (*process["sent"].values(), process["sent, smoothed"]):
            assert [size for _, size in sent["forward"]] == [2 * 8, POSITIONS * 4, 2 * POSITIONS * 4]


def test_the_backward_pass_sends_the_gradient_of_the_hidden_states_once(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        for sent in process["sent"].values():
            reduced = [size for name, size in sent["backward"] if name.startswith(("all", "reduce"))]
            assert reduced == [POSITIONS * WIDTH * 4]


# --- the lookup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", PADDINGS)
def test_a_padding_idx_is_a_row_of_the_whole_matrix(padding_idx: int | None, processes: list[dict[str, Any]]) -> None:
    """Row 30 is the second process's row 4, and 4 is a token too: neither may lose the other's gradient."""
    torch.manual_seed(1)
    weight, factor = torch.randn(51, WIDTH, requires_grad=True), torch.randn(*IDS.shape, WIDTH)
    rows = F.embedding(IDS, weight, padding_idx)
    (rows * factor).sum().backward()
    assert weight.grad is not None
    for process in processes:
        found, grad_weight = process["lookups"][padding_idx]
        assert torch.equal(found, rows)
        torch.testing.assert_close(grad_weight, weight.grad, **NEAR)
        for token in {4, 30, 0, 50}:
            assert bool(grad_weight[token].any()) == (token != (50 if padding_idx == -1 else padding_idx))


def test_ids_that_are_a_dtensor_give_rows_that_are_one(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        for one, other in zip(process["spread ids"], process["lookups"][30], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["chunked", "logits", "reference"])
def test_both_ends_give_the_matrix_their_gradients_once(backend: str, processes: list[dict[str, Any]]) -> None:
    torch.manual_seed(2)
    weight = torch.randn(51, WIDTH).double().requires_grad_()
    hidden = F.embedding(IDS, weight, 4).tanh()
    loss = linear_cross_entropy(hidden, weight, IDS.flip(0), backend="reference")
    loss.backward()
    assert weight.grad is not None
    for process in processes:
        found, grad_weight = process["both ends"][backend]
        torch.testing.assert_close(found.double(), loss.detach(), **NEAR)
        torch.testing.assert_close(grad_weight.double(), weight.grad, **NEAR)


def test_a_graph_that_is_kept_does_not_disturb_the_next_step(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert process["twice"][0].any()
        assert torch.equal(*process["twice"])


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_tied_llama_trains_as_on_one_process(plan: str, processes: list[dict[str, Any]]) -> None:
    model: Any = built("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, losses = processes[0]["models"][plan]["ids"], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    logits = model(input_ids=ids).logits
    for process in processes:
        found = process["models"][plan]
        assert found["tied"]
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        assert found["parameters"].keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["parameters"][name], parameter, **NEAR)
        torch.testing.assert_close(found["logits"], logits, **NEAR)


@pytest.mark.parametrize("plan", PLANS)
def test_no_process_holds_all_logits_unless_they_are_asked_for(plan: str, processes: list[dict[str, Any]]) -> None:
    for process in processes:
        found = process["models"][plan]
        assert found["fallbacks"] == 0
        assert found["widest"] == 0
        assert found["widest asked for"] == found["ids"].numel() * 51


# --- refused ----------------------------------------------------------------------------------------------------------

SPLIT_ROWS = "expected [Shard(dim=0)] on a one-dimensional mesh"


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("columns", f"weight (8, 6) is a DTensor with placements [Shard(dim=1)] on a mesh (2,): {SPLIT_ROWS}"),
        ("partial", f"[Partial(sum)] on a mesh (2,): {SPLIT_ROWS}"),
        ("replicated", "pass weight.to_local(), or shard its rows"),
        ("two axes", "[Shard(dim=0), Shard(dim=0)] on a mesh (2, 1): "),
        ("no rows", "weight (1, 6) is a DTensor with placements [Shard(dim=0)] on a mesh (2,): leaves a process"),
        ("adapters", "merge the adapters into the weight before it is sharded"),
        ("backend", "backend='torch' has no loss of a weight whose rows are split"),
        ("label", "label 8: expected 0 to 7, or -100"),
        ("labels differ", "labels differ between the processes that share the weight's rows"),
        ("numbers of labels differ", "labels differ between the processes"),
        ("another mesh", "expected one mesh for both"),
        ("ids differ", "ids differ between the processes that share the weight's rows"),
        ("no such id", "IndexError: index out of range"),
        ("negative id", "IndexError: index out of range"),
        ("lookup of columns", SPLIT_ROWS),
    ],
)
def test_the_rest_is_refused_on_every_process(what: str, seen: str, processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert re.match("(bowline.errors.)?UsageError: |IndexError: ", process["refused"][what])
        assert seen in process["refused"][what]
