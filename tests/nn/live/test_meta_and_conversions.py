"""Meta and back, and the conversions that torch makes by new parameters: the tie is gone, unless it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bowline.nn import check_ties, find_ties
from bowline.nn.guards.keep_tied import keep_tied
from tests.nn.models import BertLike, EncoderDecoder, TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to-meta": lambda model: model.to("meta"),
    "meta-to-empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "to-empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.fixture(params=CONVERSIONS.values(), ids=list(CONVERSIONS))
def conversion(request: pytest.FixtureRequest) -> Callable[[nn.Module], Any]:
    found: Callable[[nn.Module], Any] = request.param
    return found


@pytest.fixture
def swapping() -> Iterator[None]:
    """`swap_tensors` in place of new parameters, for all of torch, until the test ends."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def is_tied(model: TinyLM) -> bool:
    return model.head.weight is model.emb.weight


@pytest.mark.parametrize("name", ["to-meta", "meta-to-empty"])
def test_torch_unties(name: str) -> None:
    model = tied(TinyLM())
    CONVERSIONS[name](model)
    assert not is_tied(model)
    assert not find_ties(model).ties
    assert not check_ties(model)


def test_keep_tied_keeps_it(conversion: Callable[[nn.Module], Any]) -> None:
    model = tied(TinyLM())
    with keep_tied(model):
        conversion(model)
        assert is_tied(model), "inside already: what is loaded next finds one matrix"
    assert is_tied(model)
    assert check_ties(model)


@pytest.mark.parametrize("build", [BertLike, EncoderDecoder])
def test_keep_tied_keeps_every_tie(build: Callable[[], Any], conversion: Callable[[nn.Module], Any]) -> None:
    model = build()
    for target, source in model.ties.items() if isinstance(model.ties, dict) else model.ties:
        setattr(model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2], model.get_parameter(source))
    before = find_ties(model)
    assert len(before) == len(model.ties)
    with keep_tied(model):
        conversion(model)
    assert find_ties(model) == before


def test_from_meta_to_values_in_one_go_the_model_computes_what_it_did() -> None:
    model = tied(TinyLM())
    state, expected = model.state_dict(), model(IDS).detach()
    with keep_tied(model):
        model.to("meta")
        model.load_state_dict(state, assign=True)
    assert is_tied(model)
    assert torch.equal(model(IDS), expected)
    model(IDS).square().sum().backward()
    assert model.head.weight.grad is model.emb.weight.grad is not None


# --- torch's own way: swapping ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("swapping")
def test_swapping_keeps_the_tie_through_conversions(conversion: Callable[[nn.Module], Any]) -> None:
    model = tied(TinyLM())
    conversion(model)
    assert is_tied(model)


@pytest.mark.usefixtures("swapping")
def test_swapping_keeps_the_tie_through_an_assigning_load() -> None:
    model, other = tied(TinyLM()), tied(TinyLM(seed=1))
    model.load_state_dict(other.state_dict(), assign=True)
    assert is_tied(model)
    assert torch.equal(model.emb.weight, other.emb.weight)


LIVE = {**CONVERSIONS, "half": lambda model: model.half(), "float64": lambda model: model.to(torch.float64)}


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("conversion", LIVE.values(), ids=list(LIVE))
def test_swapping_fails_while_a_graph_is_alive(conversion: Callable[[nn.Module], Any]) -> None:
    model = tied(TinyLM())
    loss = model(IDS).square().sum()
    with pytest.raises(RuntimeError, match=r"Couldn't swap Embedding\.weight"):
        conversion(model)
    loss.backward()


@pytest.mark.parametrize("conversion", LIVE.values(), ids=list(LIVE))
def test_keep_tied_holds_while_a_graph_is_alive(conversion: Callable[[nn.Module], Any]) -> None:
    model = tied(TinyLM())
    loss = model(IDS).square().sum()
    with keep_tied(model):
        conversion(model)
    assert is_tied(model)
    assert loss.requires_grad


@pytest.mark.usefixtures("swapping")
def test_keep_tied_and_swapping_agree(conversion: Callable[[nn.Module], Any]) -> None:
    model = tied(TinyLM())
    table = model.emb.weight
    with keep_tied(model):
        conversion(model)
    assert is_tied(model)
    assert model.emb.weight is table
