"""Where the heads' gradient of the matrix leaves the backward pass: the one place for all of them."""

from __future__ import annotations

from typing import Any

import torch

from bowline.functional.shared_gradient import offer

__all__ = ["POSITION", "weight_gradient"]

POSITION = 1
"""Every head's Function is applied to `hidden, weight, ...`."""


def weight_gradient(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient (V, D) of tensor `POSITION` of the Function, as its backward pass returns it, which does so at once.

    Nothing else refers to the gradient by then, and nothing writes to it again but `tied_embedding`'s backward pass,
    to which it is offered.
    """
    if gradient is not None:
        offer(ctx, POSITION, gradient)
    return gradient
