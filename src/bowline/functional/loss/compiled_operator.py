"""`chunked_total` in a graph of `torch.compile`: one operator, which runs the sweep when the graph runs.

The gradients that it makes are results of the forward graph, and the backward graph multiplies them. What may be used
(`resources`) and whether labels are tokens is looked at when it runs, not when it is traced.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from bowline.functional.loss.chunks.chunk_loop import sweep
from bowline.functional.loss.chunks.loss_job import Job, Wanted
from bowline.functional.loss.float16_scaling import Lift, lifted, lowered
from bowline.functional.loss.loss_options import Options, check_labels
from bowline.functional.loss.resource_limits import current

__all__ = ["traced_total"]

SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor of_loss, Tensor? shrink, bool[] wanted, *, "
    "float logit_scale, float? softcap, int ignore_index, float label_smoothing, float z_loss, int[] mask_ids) "
    "-> (Tensor losses, Tensor of_hidden, Tensor of_weight, Tensor of_bias)"
)
Swept = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def traced_total(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factors: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The sum of factor times loss: hidden (N, D), labels and factors (N,), a number."""
    grad = torch.is_grad_enabled()
    lift = Lift.of(hidden, weight, bias, factors, options) if grad else None
    wanted = [grad and one is not None and one.requires_grad for one in (hidden, weight, bias, factors)]
    head: Any = _Traced.apply
    total: torch.Tensor = head(hidden, weight, bias, labels, factors, options, lift, wanted)
    return total


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        hidden, weight, bias, labels, factors, options, lift, wanted = args
        ends = hidden, weight, bias, labels
        losses, *gradients = _swept(*ends, *lifted(factors, lift), wanted[:3], **asdict(options))
        ctx.save_for_backward(losses, *gradients, *(lift or ()))
        ctx.wanted = wanted
        total: torch.Tensor = (losses * factors).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        losses, of_hidden, of_weight, of_bias, *lift = ctx.saved_tensors
        by, by_weight = lowered(grads[0], Lift(*lift) if lift else None)
        hidden, weight, bias, factors = ctx.wanted
        return (
            of_hidden * by if hidden else None,
            of_weight * by_weight if weight else None,
            of_bias * by if bias else None,
            None,
            losses * grads[0] if factors else None,
            None,
            None,
            None,
        )


def _run(*ends: Any, **options: Any) -> Swept:
    """What the operator does."""
    hidden, weight, bias, labels, of_loss, shrink, (of_hidden, of_weight, of_bias) = ends
    asked = Options(**options | {"mask_ids": tuple(options["mask_ids"])})
    check_labels(labels, len(weight), asked)
    wanted = Wanted(hidden=of_hidden, weight=of_weight, bias=of_bias)
    found = sweep(Job(hidden, weight, bias, labels, asked, current(), wanted, of_loss, shrink=shrink), skip=True)
    made = (found.of_hidden, found.of_weight, found.of_bias)
    first, second, third = (hidden.new_empty(0) if one is None else one.contiguous() for one in made)
    return found.losses, first, second, third


def _shapes(*ends: Any, **_options: Any) -> Swept:
    """What comes out of it: nothing in the place of a gradient that is not wanted."""
    hidden, weight, bias, labels, _, _, wanted = ends
    losses = hidden.new_empty(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    first, second, third = (
        one.new_empty(one.shape) if asked else hidden.new_empty(0)
        for one, asked in zip((hidden, weight, bias), wanted, strict=True)
    )
    return losses, first, second, third


_swept: Any = torch.library.custom_op("bowline::swept", _run, mutates_args=(), schema=SCHEMA)
_swept.register_fake(_shapes)
