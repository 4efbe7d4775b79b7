"""The backend "chunked": gradients with the losses, chunk by chunk, and the logits of one chunk at a time.

Of a mean or a sum the gradients are made in the forward pass, and the backward pass only multiplies. Where each
position's loss or lse goes on into something else, what comes back for them is not known before: the backward pass then
computes the logits again, chunk by chunk, four products instead of three.
"""

from __future__ import annotations

from typing import Any

import torch

from bowline.functional.kernels.triton_support import kernels_run_on, multiply_
from bowline.functional.loss.chunks.chunk_loop import sweep
from bowline.functional.loss.chunks.loss_job import Job, Sweep, Wanted
from bowline.functional.loss.compiled_operator import traced_total
from bowline.functional.loss.float16_scaling import Lift, lifted, lowered
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.once_differentiable import first_order_only
from bowline.functional.loss.resource_limits import Resources, current

__all__ = ["chunked_losses", "chunked_total"]


def chunked_total(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factors: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The sum over positions of factor times loss: hidden (..., D), labels and factors (...), a number."""
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), factors.reshape(-1)
    if torch.compiler.is_compiling():
        return traced_total(*flat, options)
    if not _needs_gradient(hidden, weight, bias, factors):
        found = sweep(Job(*flat[:4], options, current(), Wanted(), flat[4]), skip=True)
        return (found.losses * flat[4]).sum()
    head: Any = _AtOnce  # `apply` has no types
    total: torch.Tensor = head.apply(*flat, options, current())
    return total


def chunked_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses and the lse of each position, (...) and (...)."""
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1)
    head: Any = _Again
    losses, lse = head.apply(*flat, options, current())
    return losses.view(labels.shape), lse.view(labels.shape)


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _wanted(ctx: Any) -> Wanted:
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return Wanted(hidden=hidden, weight=weight, bias=bias)


class _AtOnce(torch.autograd.Function):
    """`chunked_total`; its gradients wait for the backward pass, which hands them over, once.

    When it runs a second time, on a retained graph, they belong to somebody else, and are made again.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        hidden, weight, bias, labels, factors, options, allowed = args
        lift = Lift.of(hidden, weight, bias, factors, options)
        of_loss, shrink = lifted(factors, lift)
        job = Job(hidden, weight, bias, labels, options, allowed, _wanted(ctx), of_loss, shrink=shrink)
        found = sweep(job, skip=True)
        ctx.save_for_backward(hidden, weight, bias, labels, factors, found.losses)
        ctx.found, ctx.lift, ctx.options, ctx.allowed = found, lift, options, allowed
        total: torch.Tensor = (found.losses * factors).sum()
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, factors, losses = ctx.saved_tensors
        found: Sweep | None = ctx.found
        ctx.found = None
        (of_total,) = grads
        if found is None:
            of_loss, shrink = lifted(factors, ctx.lift)
            job = Job(hidden, weight, bias, labels, ctx.options, ctx.allowed, _wanted(ctx), of_loss, shrink=shrink)
            found = sweep(job, skip=True)
        by, by_weight = lowered(of_total, ctx.lift)
        of_hidden, of_bias = (_times(one, by, ctx.allowed) for one in (found.of_hidden, found.of_bias))
        of_weight = _times(found.of_weight, by_weight, ctx.allowed)
        of_factors = losses * of_total if ctx.needs_input_grad[4] else None
        return of_hidden, of_weight, of_bias, None, of_factors, None, None


def _times(gradient: torch.Tensor | None, factor: torch.Tensor, allowed: Resources) -> torch.Tensor | None:
    """In place, and not at all where it is by 1, as nearly always: a pass over the matrix as long as a small batch."""
    if gradient is None or (factor.device.type == "cpu" and factor.item() == 1):
        return gradient
    if factor.device.type != "cpu" and gradient.is_contiguous() and allowed.compiler and kernels_run_on(gradient):
        return multiply_(gradient, factor)  # it is not known here whether it is 1
    return gradient.mul_(factor)


class _Again(torch.autograd.Function):
    """`chunked_losses`: the backward pass begins with the logits, once more."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, bias, labels, options, allowed = args
        found = sweep(Job(hidden, weight, bias, labels, options, allowed, Wanted(), labels))
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.options, ctx.allowed = options, allowed
        ctx.set_materialize_grads(False)
        return found.losses, found.lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        of_loss, of_lse = grads
        if of_loss is None:
            of_loss = torch.zeros_like(labels, dtype=torch.promote_types(hidden.dtype, torch.float32))
        job = Job(hidden, weight, bias, labels, ctx.options, ctx.allowed, _wanted(ctx), of_loss, of_lse)
        found = sweep(job, skip=of_lse is None)
        return found.of_hidden, found.of_weight, found.of_bias, None, None, None
