"""What sees a gradient sees the whole one, and whoever holds the head's own keeps it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import (
    body,
    dense_gradients,
    head,
    loss_of,
    matrix,
    near,
    plain,
    tied,
    tokens,
    untied,
)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_hook_on_the_matrix_sees_both_ends_once(leaf: bool) -> None:
    parameter = matrix(torch.float64)
    weight = parameter if leaf else parameter * 1.0
    seen: list[torch.Tensor] = []
    weight.register_hook(seen.append)
    with dense_gradients(0):
        tied(plain, weight).backward()
    assert len(seen) == 1
    near(seen[0], untied(plain, weight))
    near(parameter.grad, untied(plain, weight))


def test_a_hook_may_change_clone_or_keep_the_gradient() -> None:
    weight = matrix(torch.float64)
    kept: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: kept.extend([gradient, gradient.clone()]))
    weight.register_hook(lambda gradient: gradient * 2)
    for _ in range(2):
        tied(plain, weight).backward()
    near(weight.grad, 4 * untied(plain, weight))
    for one in kept:
        near(one, untied(plain, weight))


def test_a_hook_after_accumulation_may_step_and_drop_the_gradient() -> None:
    """An optimizer's step in the backward pass."""
    weight = matrix(torch.float64)
    before, expected = weight.detach().clone(), untied(plain, weight)

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(step)
    loss = tied(plain, weight)
    with dense_gradients(0):
        loss.backward()
    near(weight.detach(), before - 0.5 * expected)
    near(torch.autograd.grad(tied(plain, weight), weight)[0], untied(plain, weight))


@pytest.mark.parametrize("how", ["python", "grad", "view", "changed"])
def test_a_gradient_of_the_head_that_somebody_holds_is_not_written_to(how: str) -> None:
    """By a hook on the head's own node; the rows are then added to a copy."""
    weight = matrix(torch.float64)
    kept: list[Any] = []

    def hook(of_inputs: Any, of_outputs: Any) -> Any:
        given = of_inputs[1]
        kept.append(given.clone())
        if how == "python":
            kept.append(given)
        elif how == "grad":
            kept.append(torch.zeros_like(given))
            kept[-1].grad = given
        elif how == "view":
            kept.append(given.view(-1))
        else:
            return of_inputs[0], given * 1
        return None

    logits = head(body(tied_embedding(tokens(), weight)), weight)
    assert logits.grad_fn is not None
    logits.grad_fn.register_hook(hook)
    with dense_gradients(0, copies=int(how != "changed")):  # nobody holds the one that the hook returned
        loss_of(logits).backward()
    near(weight.grad, untied(plain, weight))
    if how != "changed":
        held = kept[1].grad if how == "grad" else kept[1].view_as(kept[0])
        assert torch.equal(held, kept[0])


def test_a_hook_on_several_tensors_and_a_retained_gradient_see_the_whole() -> None:
    parameter = matrix(torch.float64)
    weight = parameter * 1.0
    weight.retain_grad()
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((weight, parameter), seen.append)
    tied(plain, weight).backward()
    near(weight.grad, untied(plain, weight))
    for one in seen[0]:
        near(one, untied(plain, weight))


def test_anomaly_mode_finds_nothing() -> None:
    weight = matrix(torch.float64)
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"), torch.autograd.detect_anomaly():
        tied(plain, weight).backward()
    near(weight.grad, untied(plain, weight))
