"""One matrix that is listed twice is stepped, clipped and frozen twice: what torch does, and who says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bowline.errors import TieError
from bowline.nn import check_ties, tie_weights, untie_weights
from bowline.nn.tree.unique_parameters import unique_parameters
from tests.nn.models import TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def listed(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter under every name: what a list made module by module holds."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]


def kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    return {remark.kind for remark in check_ties(model, optimizer=optimizer)["head.weight"].remarks}


# --- listed twice -----------------------------------------------------------------------------------------------------

TWICE = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")


def test_torch_warns_of_duplicates_and_goes_on() -> None:
    with pytest.warns(UserWarning, match="duplicate parameters"):
        torch.optim.SGD(listed(tied(TinyLM())), lr=0.5)


def moved(parameters: Any, model: TinyLM, **options: Any) -> torch.Tensor:
    """How far one step of SGD takes the shared matrix, from zero, along a gradient of ones."""
    with torch.no_grad():
        model.emb.weight.zero_()
    model.emb.weight.grad = torch.ones_like(model.emb.weight)
    torch.optim.SGD(parameters, lr=0.5, **options).step()
    return model.emb.weight.detach().clone()


@TWICE
@pytest.mark.parametrize("foreach", [False, True])
def test_sgd_steps_exactly_twice_as_far(foreach: bool) -> None:
    model = tied(TinyLM())
    once = moved(model.parameters(), model, foreach=foreach)
    twice = moved(listed(model), model, foreach=foreach)
    assert torch.equal(once, torch.full_like(once, -0.5))
    assert torch.equal(twice, 2 * once)


@TWICE
def test_each_parameter_once_steps_as_far_as_it_should() -> None:
    model = tied(TinyLM())
    assert torch.equal(moved(unique_parameters(listed(model)), model), moved(model.parameters(), model))


@TWICE
def test_a_check_of_the_optimizer_says_that_it_holds_it_twice() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.SGD(listed(model), lr=0.5)
    assert kinds(model, optimizer) == {"duplicate"}
    with pytest.raises(TieError, match=r"holds (emb|head)\.weight 2 times, so each step updates it 2 times"):
        check_ties(model, optimizer=optimizer).raise_if_broken()
    assert check_ties(model, optimizer=torch.optim.SGD(unique_parameters(listed(model)), lr=0.5))


def test_torch_refuses_one_parameter_in_two_groups_and_an_alias_it_does_not_see() -> None:
    model = tied(TinyLM())
    with pytest.raises(ValueError, match="more than one parameter group"):
        torch.optim.SGD([{"params": [model.emb.weight]}, {"params": [model.head.weight]}], lr=0.5)
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    apart: list[dict[str, Any]] = [{"params": [end.weight]} for end in (model.emb, model.head)]
    assert not check_ties(model, optimizer=torch.optim.SGD(apart, lr=0.5))
    assert len(list(unique_parameters([model.emb.weight, model.head.weight]))) == 1


# --- clipping ---------------------------------------------------------------------------------------------------------


def with_gradients() -> TinyLM:
    """Gradients whose squares sum to 2.03 over the shared matrix and to 0.435 over the norm's weight and bias."""
    model = tied(TinyLM())
    model.emb.weight.grad = torch.full_like(model.emb.weight, math.sqrt(2.03 / model.emb.weight.numel()))
    for parameter in (model.norm.weight, model.norm.bias):
        parameter.grad = torch.full_like(parameter, math.sqrt(0.435 / 2 / parameter.numel()))
    return model


def test_clipping_a_list_with_duplicates_sees_2_12_where_the_norm_is_1_57() -> None:
    model = with_gradients()
    assert float(clip_grad_norm_(listed(model), math.inf)) == pytest.approx(2.12, abs=5e-3)
    assert float(clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(1.57, abs=5e-3)


def test_clipping_a_list_with_duplicates_scales_the_shared_gradient_twice() -> None:
    model = with_gradients()
    clip_grad_norm_(listed(model), 1.0)
    assert model.emb.weight.grad is not None
    assert model.norm.weight.grad is not None
    shared = float(model.emb.weight.grad.square().sum()) / 2.03
    other = float(model.norm.weight.grad.square().sum()) / (0.435 / 2)
    assert other == pytest.approx(1 / 2.12**2, rel=1e-2)
    assert shared == pytest.approx(1 / 2.12**4, rel=1e-2)


@pytest.mark.parametrize("way", ["listed-twice", "alias"])
def test_each_parameter_once_gives_the_norm_and_the_clip_that_it_should(way: str) -> None:
    model = with_gradients()
    if way == "alias":
        gradient = model.emb.weight.grad
        model.head.weight = nn.Parameter(model.emb.weight.detach())
        model.head.weight.grad = gradient
    norm = clip_grad_norm_(unique_parameters(listed(model)), 1.0)
    assert float(norm) == pytest.approx(1.57, abs=5e-3)
    gradients = [p.grad for p in (model.emb.weight, *model.norm.parameters()) if p.grad is not None]
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert total == pytest.approx(1.0, rel=1e-4)


# --- freezing ---------------------------------------------------------------------------------------------------------


def test_freezing_the_head_freezes_the_embedding_and_a_check_says_so() -> None:
    model = tied(TinyLM())
    model.head.requires_grad_(False)
    model(IDS).square().sum().backward()
    assert model.emb.weight.grad is None
    report = check_ties(model)
    assert report, "worth knowing, and no fault: it may be meant"
    assert "freezing head.weight freezes emb.weight: they are one parameter" in str(report)


def test_untied_first_the_head_is_frozen_alone() -> None:
    model = tied(TinyLM())
    untie_weights(model)
    model.head.requires_grad_(False)
    model(IDS).square().sum().backward()
    assert model.emb.weight.grad is not None
    assert model.head.weight.grad is None
    assert "only head.weight is frozen" in str(check_ties(model))


# --- tied after the optimizer was built -------------------------------------------------------------------------------


def test_tying_after_the_optimizer_was_built_leaves_a_stale_parameter_in_it() -> None:
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stale = model.head.weight
    tied(model)
    assert any(p is stale for group in optimizer.param_groups for p in group["params"])
    assert not any(p is stale for p in model.parameters())
    assert kinds(model, optimizer) == {"stale"}


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_tie_weights_takes_the_optimizer_along(build: Any) -> None:
    model = TinyLM()
    optimizer = build(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    optimizer.step()
    assert tie_weights(model, on_conflict="source", optimizer=optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
