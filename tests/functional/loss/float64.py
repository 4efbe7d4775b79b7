"""A head of any size and dtype, and the distance of its loss and gradients from float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS, WIDTH, SIZE = 512, 32, 1000
Loss = Callable[..., torch.Tensor]


def head(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (N, D) and weight (V, D), values of `dtype`, and labels (N,), some often and some never, some ignored."""
    torch.manual_seed(0)
    labels = (torch.rand(ROWS) ** 3 * (SIZE - 11)).long() + 11
    labels[::7] = -100
    return torch.randn(ROWS, WIDTH).to(dtype), (torch.randn(SIZE, WIDTH) * scale).to(dtype), labels


def errors(loss_of: Loss, hidden: torch.Tensor, weight: torch.Tensor, exact: list[torch.Tensor]) -> list[float]:
    """Relative norms of the differences of loss, dHidden and dWeight from float64."""
    found = computed(loss_of, hidden, weight)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def computed(loss_of: Loss, hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in (hidden, weight)]
    loss = loss_of(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
