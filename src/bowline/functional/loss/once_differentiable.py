"""Makes second-order gradients raise in backward passes that cannot be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bowline.errors import UsageError
from bowline.functional.kernels.function_transforms import is_batched

__all__ = ["first_order_only"]

Gradients = tuple[torch.Tensor | None, ...]


class _Refusal(torch.autograd.Function):
    """Returns a gradient unchanged and ties it to `ends`, so that differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        raise UsageError(
            "second-order gradients of linear_cross_entropy: this backend computes only first-order ones",
            help='backend="reference"',
        )


def first_order_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Like torch's `once_differentiable`, which looks only at incoming gradients; this also counts saved tensors.

    The Function saves first the tensors that its gradients depend on.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: torch.Tensor | None) -> Gradients:
        if any(one is not None and is_batched(one) for one in grads):
            raise UsageError(
                "batched gradients of linear_cross_entropy: this backend computes one at a time",
                help='backend="reference"',
            )
        graph = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not graph or torch.compiler.is_compiling():
            return found
        ends = [one for one in (*ctx.saved_tensors, *grads) if one is not None and one.requires_grad]
        refuse: Any = _Refusal
        return tuple(None if one is None else refuse.apply(one, *ends) for one in found) if ends else found

    return once
