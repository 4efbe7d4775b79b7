"""Scales float16 gradients up until the backward pass, because the gradients of a mean would underflow.

A GradScaler's factor arrives with the backward pass, too late for gradients that the forward pass rounded to 0. All
scales are powers of two, kept as tensors, so that no step waits for the GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bowline.functional.loss.loss_options import Options

__all__ = ["Float16Scale", "scaled_down", "scaled_up"]

LARGEST = 2.0**13
"""Bound on every scaled gradient; the largest float16 number is 65504."""
EXPONENTS = 100.0
"""Largest absolute exponent of a scale, so that it is finite whatever the factors are."""


class Float16Scale(NamedTuple):
    """The scale of the gradients of logits, hidden and bias, and the lower scale of the matrix's gradient.

    The matrix's gradient is a sum of hidden states. With one scale for all, hidden states in the hundreds would leave
    too little range for the gradients of the logits.
    """

    grad_logits: torch.Tensor
    grad_weight: torch.Tensor

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factors: torch.Tensor,
        options: Options,
    ) -> Float16Scale | None:
        """The scales for hidden (N, D), weight (V, D), bias (V,), loss factors (N,); `None` unless in float16."""
        if hidden.dtype != torch.float16 or not hidden.numel():
            return None
        most, steepest = (_largest(one, factors.dtype, dim) for one, dim in ((hidden, -1), (weight, None)))
        slope: torch.Tensor | float = abs(options.logit_scale)
        if options.z_loss:
            logit = slope * hidden.shape[-1] * most * steepest
            if bias is not None:
                logit = logit + slope * _largest(bias, factors.dtype)
            if options.softcap is not None:
                logit = logit.clamp(max=options.softcap)
            slope = slope * (1 + 2 * options.z_loss * (logit + math.log(len(weight))))
        grad_each = factors.detach().abs() * slope
        total, largest = grad_each.sum(), grad_each.amax()
        grad_logits = torch.maximum(total, 2 * steepest * largest)
        return cls(_power(grad_logits), _power(torch.maximum(grad_logits, (grad_each * most).sum())))


def scaled_up(factors: torch.Tensor, scale: Float16Scale | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scaled loss factors, and the factor on hidden for the matrix's gradient (`None` for 1)."""
    return (factors, None) if scale is None else (factors * scale.grad_logits, scale.grad_weight / scale.grad_logits)


def scaled_down(grad_total: torch.Tensor, scale: Float16Scale | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors that undo the scales in the backward pass: for hidden and bias, and for the matrix."""
    return (
        (grad_total, grad_total) if scale is None else (grad_total / scale.grad_logits, grad_total / scale.grad_weight)
    )


def _largest(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """The largest absolute value, or 0 where it is infinite; `aminmax` is 20 times as fast as a norm."""
    low, high = torch.aminmax(tensor.detach(), dim=dim)
    return torch.maximum(-low, high).to(dtype).nan_to_num(0.0, 0.0)


def _power(bound: torch.Tensor) -> torch.Tensor:
    """The largest power of two that scales a bound to at most `LARGEST`; 1 for a bound of 0."""
    exponent = (LARGEST / bound.masked_fill(bound == 0, LARGEST)).log2().floor()
    return exponent.clamp(-EXPONENTS, EXPONENTS).exp2()
