"""Two ends of one matrix, with a head of few lines, and the true gradient: that of two untied ends in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional import shared_gradient
from bowline.functional.shared_gradient import head_weight
from bowline.functional.tied_lookup import tied_embedding

V, D, N = 13, 4, 9

module = importlib.import_module("bowline.functional.tied_lookup")
"""The file, whatever the package calls by its name."""
addresses: list[int] = []
"""Of the gradients that heads have returned, the latest last."""


class Head(torch.autograd.Function):
    """logits = hidden weightᵀ: (N, D) and (V, D) to (N, V)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        grad_weight = grads[0].t() @ hidden
        if not torch.compiler.is_compiling():
            addresses.append(grad_weight.data_ptr())
        return grads[0] @ weight, grad_weight


def head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    function: Any = Head
    logits: torch.Tensor = function.apply(hidden, head_weight(weight))
    return logits


def matrix(dtype: torch.dtype = torch.float32, size: int = V, width: int = D, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype))


def tokens(*shape: int, size: int = V, seed: int = 1) -> torch.Tensor:
    """With duplicates: half as many kinds as rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(1, size // 2), shape or (N,), generator=generator)


def loss_of(logits: torch.Tensor, seed: int = 2) -> torch.Tensor:
    """A sum with fixed factors: a gradient whose entries all differ."""
    factors = torch.arange(logits.numel(), dtype=torch.float64).add(seed).square().sin()
    factors = factors.view(logits.shape).to(logits.dtype)
    return (logits * factors + logits.tanh() * factors).sum()


def body(rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) + rows.cumsum(-2) / 10


def truth(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The gradient of `loss_of(body(weight[ids]) weightᵀ)`: each end as a matrix of its own, float64, added."""
    source = weight.detach().double().requires_grad_()
    target = weight.detach().double().requires_grad_()
    one_hot = F.one_hot(ids, len(weight)).double()
    if padding_idx is not None:
        known = one_hot @ source.detach()
        rows = torch.where((ids == padding_idx)[..., None], known, one_hot @ source)
    else:
        rows = one_hot @ source
    loss_of(body(rows) @ target.t()).backward()
    assert source.grad is not None and target.grad is not None
    return source.grad + target.grad


@contextmanager
def dense_gradients(number: int, size: int = V, copies: int = 0) -> Iterator[None]:
    """So many dense gradients are made for lookups inside, and so many gradients of heads are copied.

    Counted at the functions that make them: under a dispatch mode autograd never adds in place, and shares less.
    """
    made: list[int] = []
    copied: list[int] = []

    def counting(rows: torch.Tensor, ids: torch.Tensor, rows_of_result: int, padding_idx: int) -> torch.Tensor:
        made.extend([rows_of_result] * (rows_of_result == size))
        result: torch.Tensor = dense(rows, ids, rows_of_result, padding_idx)
        return result

    def counting_copies(gradient: torch.Tensor) -> torch.Tensor:
        copied.append(len(gradient))
        return copy(gradient)

    dense, copy = module.summed_rows, shared_gradient._copy
    with pytest.MonkeyPatch.context() as patch:
        for place in (module, shared_gradient):
            patch.setattr(place, "summed_rows", counting)
        patch.setattr(shared_gradient, "_copy", counting_copies)
        yield
    assert len(made) == number, f"{len(made)} dense gradients of lookups were made, expected {number}"
    assert len(copied) == copies, f"{len(copied)} gradients of heads were copied, expected {copies}"


def near(gradient: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert gradient is not None
    assert gradient.layout == torch.strided
    tolerance = 1e-12 if gradient.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


needs_gloo = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


Lookup = Callable[[torch.Tensor], torch.Tensor]
Model = Callable[[Lookup, Lookup], torch.Tensor]
"""A loss of a lookup, ids to rows, and a head, rows to logits."""


def plain(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    return loss_of(to_logits(body(lookup(tokens()))))


def tied(model: Model, weight: torch.Tensor) -> torch.Tensor:
    """The loss with our lookup and the head above."""
    return model(lambda ids: tied_embedding(ids, weight), lambda hidden: head(hidden, weight))


def untied(model: Model, weight: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients of the ends, each a matrix of its own, in float64 and by products alone."""
    source = weight.detach().double().requires_grad_()
    target = weight.detach().double().requires_grad_()
    model(
        lambda ids: F.one_hot(ids, len(source)).double() @ source, lambda hidden: hidden.double() @ target.t()
    ).backward()
    zero = torch.zeros_like(source)
    return (zero if source.grad is None else source.grad) + (zero if target.grad is None else target.grad)
