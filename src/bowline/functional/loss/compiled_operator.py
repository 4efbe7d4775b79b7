"""`chunked_total` under `torch.compile`: one custom operator, which computes the loss when the graph runs.

The operator returns the gradients too: they are results of the forward graph, and the backward graph multiplies them.
Limits (`resources`) and labels are checked when the operator runs, not when it is traced.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from bowline.functional.loss.chunks.chunk_loop import run_job
from bowline.functional.loss.chunks.loss_job import LossJob, Wanted
from bowline.functional.loss.float16_scaling import Float16Scale, scaled_down, scaled_up
from bowline.functional.loss.loss_options import Options, check_labels
from bowline.functional.loss.resource_limits import current

__all__ = ["traced_total"]

SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor grad_loss, Tensor? shrink, bool[] wanted, *, "
    "float logit_scale, float? softcap, int ignore_index, float label_smoothing, float z_loss, int[] mask_ids) "
    "-> (Tensor losses, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)"
)
OperatorResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def traced_total(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factors: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The sum of factor times loss, a number: hidden (N, D), labels and factors (N,)."""
    grad = torch.is_grad_enabled()
    scale = Float16Scale.of(hidden, weight, bias, factors, options) if grad else None
    wanted = [grad and one is not None and one.requires_grad for one in (hidden, weight, bias, factors)]
    head: Any = _Traced.apply
    total: torch.Tensor = head(hidden, weight, bias, labels, factors, options, scale, wanted)
    return total


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        hidden, weight, bias, labels, factors, options, scale, wanted = args
        ends = hidden, weight, bias, labels
        losses, *gradients = _operator(*ends, *scaled_up(factors, scale), wanted[:3], **_as_keywords(options))
        ctx.save_for_backward(losses, *gradients, *(scale or ()))
        ctx.wanted = wanted
        total: torch.Tensor = (losses * factors).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        losses, grad_hidden, grad_weight, grad_bias, *scale = ctx.saved_tensors
        by, by_weight = scaled_down(grads[0], Float16Scale(*scale) if scale else None)
        hidden, weight, bias, factors = ctx.wanted
        return (
            grad_hidden * by if hidden else None,
            grad_weight * by_weight if weight else None,
            grad_bias * by if bias else None,
            None,
            losses * grads[0] if factors else None,
            None,
            None,
            None,
        )


def _as_keywords(options: Options) -> dict[str, Any]:
    """The fields by name, read one by one: torch.compile of torch 2.10 and older cannot trace `asdict`."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def _run(*ends: Any, **options: Any) -> OperatorResult:
    """The operator's implementation."""
    hidden, weight, bias, labels, grad_loss, shrink, (grad_hidden, grad_weight, grad_bias) = ends
    asked = Options(**options | {"mask_ids": tuple(options["mask_ids"])})
    check_labels(labels, len(weight), asked)
    wanted = Wanted(hidden=grad_hidden, weight=grad_weight, bias=grad_bias)
    found = run_job(
        LossJob(hidden, weight, bias, labels, asked, current(), wanted, grad_loss, shrink=shrink), skip=True
    )
    made = (found.grad_hidden, found.grad_weight, found.grad_bias)
    first, second, third = (hidden.new_empty(0) if one is None else one.contiguous() for one in made)
    return found.losses, first, second, third


def _shapes(*ends: Any, **_options: Any) -> OperatorResult:
    """The shapes of the operator's results; a gradient that is not wanted is an empty tensor."""
    hidden, weight, bias, labels, _, _, wanted = ends
    losses = hidden.new_empty(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    first, second, third = (
        one.new_empty(one.shape) if asked else hidden.new_empty(0)
        for one, asked in zip((hidden, weight, bias), wanted, strict=True)
    )
    return losses, first, second, third


_operator: Any = torch.library.custom_op("bowline::chunked_loss", _run, mutates_args=(), schema=SCHEMA)
_operator.register_fake(_shapes)
