"""A gradient of the head that torch itself holds, outside Python, when another gradient of the matrix was summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import body, head, loss_of, matrix, near, plain, tied, tokens, untied


@pytest.mark.parametrize("other", ["ordinary use", "head"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_gradient_that_torch_holds_after_it_was_summed_elsewhere_is_not_lost(other: str, order: str) -> None:
    """Reference counts then look as if autograd alone held the head's tensor, which nobody sums any more."""
    weight, holder = matrix(torch.float64), torch.zeros_like(matrix(torch.float64))
    expected = untied(plain, weight)
    kept: list[torch.Tensor] = []

    def keep(of_inputs: Any, of_outputs: Any) -> None:
        kept.append(of_inputs[1].clone())
        holder.grad = of_inputs[1]

    hidden = torch.ones(3, weight.shape[1], dtype=torch.float64)

    def more() -> torch.Tensor:
        return weight.sin().sum() if other == "ordinary use" else loss_of(head(hidden, weight))

    extra = more() if order == "after" else None  # autograd runs what was made last first
    logits = head(body(tied_embedding(tokens(), weight)), weight)
    assert logits.grad_fn is not None
    logits.grad_fn.register_hook(keep)
    loss = loss_of(logits)
    (loss + (more() if extra is None else extra)).backward()
    (of_more,) = torch.autograd.grad(more(), weight)
    near(weight.grad, expected + of_more)
    assert holder.grad is not None and torch.equal(holder.grad, kept[0])
    near(torch.autograd.grad(tied(plain, weight), weight)[0], expected)
