"""The backend "chunked": computes losses and gradients chunk by chunk, with the logits of one chunk in memory.

For a mean or a sum, the forward pass computes the gradients and the backward pass only multiplies them by a number.
When each position's loss or lse is returned, their gradients are known only in the backward pass, which then computes
the logits again, chunk by chunk: four products instead of three.
"""

from __future__ import annotations

from typing import Any

import torch

from bowline.functional.kernels.triton_support import kernels_run_on, multiply_
from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.chunks.chunk_loop import run_job
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult, Wanted
from bowline.functional.loss.compiled_operator import traced_total
from bowline.functional.loss.float16_scaling import Float16Scale, scaled_down, scaled_up
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
    adapters: AdapterTerms | None = None,
) -> torch.Tensor:
    """The sum over positions of factor times loss, a number: hidden (..., D), labels and factors (...)."""
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), factors.reshape(-1)
    if torch.compiler.is_compiling():
        return traced_total(*flat, options)
    terms = _flat(adapters)
    if not _needs_gradient(hidden, weight, bias, factors, terms.left, terms.right, terms.columns):
        job = LossJob(*flat[:4], options, current(), Wanted(), flat[4], adapters=adapters and terms)
        found = run_job(job, skip=True)
        return (found.losses * flat[4]).sum()
    head: Any = _TotalHead  # `apply` has no types
    total: torch.Tensor = head.apply(*flat, terms.left, terms.right, terms.ids, terms.columns, options, current())
    return total


def chunked_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
    adapters: AdapterTerms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses and the lse of each position, (...) and (...)."""
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1)
    terms = _flat(adapters)
    head: Any = _LossesHead
    losses, lse = head.apply(*flat, terms.left, terms.right, terms.ids, terms.columns, options, current())
    return losses.view(labels.shape), lse.view(labels.shape)


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _flat(adapters: AdapterTerms | None) -> AdapterTerms:
    """The terms with one row a position; none without adapters."""
    return AdapterTerms() if adapters is None else adapters.over_positions(lambda one: one.reshape(-1, one.shape[-1]))


def _terms(left: Any, right: Any, ids: Any, columns: Any) -> AdapterTerms | None:
    if left is None and columns is None:
        return None
    return AdapterTerms(left=left, right=right, ids=ids, columns=columns)


def _wanted(ctx: Any, first_term: int) -> Wanted:
    """Which gradients a Function wants; its inputs from `first_term` on are left, right, ids and columns."""
    hidden, weight, bias = ctx.needs_input_grad[:3]
    left, right, _, columns = ctx.needs_input_grad[first_term : first_term + 4]
    return Wanted(hidden=hidden, weight=weight, bias=bias, terms=(left, right, columns))


def _term_gradients(
    found: LossResult, dtypes: tuple[torch.dtype | None, ...], factor: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of left, right, ids and columns, times a factor, in the dtypes of left, right and columns."""
    if found.terms is None:
        return None, None, None, None
    left, right, columns = (
        None if one is None else (one if factor is None else one * factor).to(dtype)
        for one, dtype in zip((found.terms.left, found.terms.right, found.terms.columns), dtypes, strict=True)
    )
    return left, right, None, columns


def _dtypes(*tensors: torch.Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if one is None else one.dtype for one in tensors)


class _TotalHead(torch.autograd.Function):
    """`chunked_total`: computes the gradients in the forward pass and returns them in the backward pass, once.

    A second backward pass, on a retained graph, computes them again, because the first pass gave them away.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        hidden, weight, bias, labels, factors, left, right, ids, columns, options, allowed = args
        scale = Float16Scale.of(hidden, weight, bias, factors, options)
        grad_loss, shrink = scaled_up(factors, scale)
        job = LossJob(
            hidden,
            weight,
            bias,
            labels,
            options,
            allowed,
            _wanted(ctx, 5),
            grad_loss,
            shrink=shrink,
            adapters=_terms(left, right, ids, columns),
        )
        found = run_job(job, skip=True)
        ctx.save_for_backward(hidden, weight, bias, labels, factors, found.losses, left, right, ids, columns)
        ctx.found, ctx.scale, ctx.options, ctx.allowed = found, scale, options, allowed
        total: torch.Tensor = (found.losses * factors).sum()
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, factors, losses, left, right, ids, columns = ctx.saved_tensors
        found: LossResult | None = ctx.found
        ctx.found = None
        (grad_total,) = grads
        if found is None:
            grad_loss, shrink = scaled_up(factors, ctx.scale)
            job = LossJob(
                hidden,
                weight,
                bias,
                labels,
                ctx.options,
                ctx.allowed,
                _wanted(ctx, 5),
                grad_loss,
                shrink=shrink,
                adapters=_terms(left, right, ids, columns),
            )
            found = run_job(job, skip=True)
        by, by_weight = scaled_down(grad_total, ctx.scale)
        grad_hidden, grad_bias = (_times(one, by, ctx.allowed) for one in (found.grad_hidden, found.grad_bias))
        grad_weight = _times(found.grad_weight, by_weight, ctx.allowed)
        grad_factors = losses * grad_total if ctx.needs_input_grad[4] else None
        terms = _term_gradients(found, _dtypes(left, right, columns), by)
        return grad_hidden, grad_weight, grad_bias, None, grad_factors, *terms, None, None


def _times(gradient: torch.Tensor | None, factor: torch.Tensor, allowed: Resources) -> torch.Tensor | None:
    """The gradient times a factor, in place; skipped when the factor is 1, as it nearly always is.

    Multiplying the whole matrix takes as long as the loss of a small batch.
    """
    if gradient is None or (factor.device.type == "cpu" and factor.item() == 1):
        return gradient
    if factor.device.type != "cpu" and gradient.is_contiguous() and allowed.compiler and kernels_run_on(gradient):
        return multiply_(gradient, factor)  # on a GPU the factor is not read: the kernel skips a 1
    return gradient.mul_(factor)


class _LossesHead(torch.autograd.Function):
    """`chunked_losses`: the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, bias, labels, left, right, ids, columns, options, allowed = args
        adapters = _terms(left, right, ids, columns)
        found = run_job(LossJob(hidden, weight, bias, labels, options, allowed, Wanted(), labels, adapters=adapters))
        ctx.save_for_backward(hidden, weight, bias, labels, left, right, ids, columns)
        ctx.options, ctx.allowed = options, allowed
        ctx.set_materialize_grads(False)
        return found.losses, found.lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, left, right, ids, columns = ctx.saved_tensors
        grad_loss, grad_lse = grads
        if grad_loss is None:
            grad_loss = torch.zeros_like(labels, dtype=torch.promote_types(hidden.dtype, torch.float32))
        job = LossJob(
            hidden,
            weight,
            bias,
            labels,
            ctx.options,
            ctx.allowed,
            _wanted(ctx, 4),
            grad_loss,
            grad_lse,
            adapters=_terms(left, right, ids, columns),
        )
        found = run_job(job, skip=grad_lse is None)
        terms = _term_gradients(found, _dtypes(left, right, columns))
        return found.grad_hidden, found.grad_weight, found.grad_bias, None, *terms, None, None
