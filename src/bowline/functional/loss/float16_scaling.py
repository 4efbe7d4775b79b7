"""By how much float16's gradients are larger until the backward pass: a mean's would underflow.

A GradScaler's factor comes with the backward pass, too late for what was rounded to 0 in the forward pass. Everything
here is a power of two, a tensor that nobody has to wait for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bowline.functional.loss.loss_options import Options

__all__ = ["Lift", "lifted", "lowered"]

LARGEST = 2.0**13
"""What no gradient of float16, whose largest number is 65504, is lifted over."""
EXPONENTS = 100.0
"""Of a lift, at most: it is a number whatever the factors are."""


class Lift(NamedTuple):
    """Of the gradients of logits, hidden and bias; and that of the matrix's, which is not as high.

    The matrix's is a sum of hidden states, and one of hundreds would take what the gradients of logits need.
    """

    of_logits: torch.Tensor
    of_weight: torch.Tensor

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factors: torch.Tensor,
        options: Options,
    ) -> Lift | None:
        """Of hidden (N, D), weight (V, D), bias (V,) and factors (N,) of the losses; `None` where it is not float16."""
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
        of_each = factors.detach().abs() * slope
        total, largest = of_each.sum(), of_each.amax()
        of_logits = torch.maximum(total, 2 * steepest * largest)
        return cls(_power(of_logits), _power(torch.maximum(of_logits, (of_each * most).sum())))


def lifted(factors: torch.Tensor, lift: Lift | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The factors of the losses, and what hidden is multiplied by for the matrix's gradient; `None` for not at all."""
    return (factors, None) if lift is None else (factors * lift.of_logits, lift.of_weight / lift.of_logits)


def lowered(of_total: torch.Tensor, lift: Lift | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What gradients are multiplied by in the backward pass: of hidden and bias, and of the matrix."""
    return (of_total, of_total) if lift is None else (of_total / lift.of_logits, of_total / lift.of_weight)


def _largest(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """The largest absolute number, 0 for an infinite one; `aminmax` is 20 times as fast as a norm."""
    low, high = torch.aminmax(tensor.detach(), dim=dim)
    return torch.maximum(-low, high).to(dtype).nan_to_num(0.0, 0.0)


def _power(bound: torch.Tensor) -> torch.Tensor:
    """The largest power of two that lifts a bound to no more than `LARGEST`; 1 where there is nothing to lift."""
    exponent = (LARGEST / bound.masked_fill(bound == 0, LARGEST)).log2().floor()
    return exponent.clamp(-EXPONENTS, EXPONENTS).exp2()
