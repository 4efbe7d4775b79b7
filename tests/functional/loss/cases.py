"""Small heads, and their losses in Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bowline.functional.loss import linear_cross_entropy

BACKENDS = ["reference", "logits", "chunked"]
needs_torchs_own = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)
TORCHS_OWN = pytest.param("torch", marks=needs_torchs_own)
D, V = 5, 11
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 2.0},
    {"logit_scale": 0.3},
    {"mask_ids": [0, 10]},
    {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 3.0, "logit_scale": 1.7, "mask_ids": [3]},
]


def case(
    *shape: int, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """hidden (..., D), weight (V, D), labels (...) with a few ignored and none of 0, 3, 10, and a bias (V,)."""
    torch.manual_seed(seed)
    shape = shape or (2, 4)
    hidden = torch.randn(*shape, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    labels = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9])[torch.randint(0, 8, shape)]
    labels.view(-1)[1::3] = -100
    return hidden, weight, labels, torch.randn(V).to(dtype).requires_grad_() if bias else None


def by_hand(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: torch.Tensor | None = None,
    mask_ids: list[int] | None = None,
    ignore_index: int = -100,
) -> tuple[list[float], float, list[float]]:
    """Each position's loss, the divisor of the mean, and each lse: Python's own numbers, one at a time."""
    losses, divisor, lses = [], 0.0, []
    rows, table = hidden.detach().reshape(-1, hidden.shape[-1]).tolist(), weight.detach().tolist()
    added = bias.detach().tolist() if bias is not None else [0.0] * len(table)
    for row, label in zip(rows, labels.flatten().tolist(), strict=True):
        logits = {}
        for token, line in enumerate(table):
            logit = logit_scale * (sum(a * b for a, b in zip(row, line, strict=True)) + added[token])
            if token not in (mask_ids or ()):
                logits[token] = softcap * math.tanh(logit / softcap) if softcap else logit
        lse = math.log(sum(math.exp(logit) for logit in logits.values()))
        lses.append(lse)
        if label == ignore_index:
            losses.append(0.0)
            continue
        wanted = {token: label_smoothing / len(logits) + (1 - label_smoothing) * (token == label) for token in logits}
        loss = sum(wanted[token] * (lse - logit) for token, logit in logits.items()) + z_loss * lse**2
        factor = 1.0 if class_weight is None else float(class_weight[label])
        losses.append(factor * loss)
        divisor += factor
    return losses, divisor, lses


def gradients(loss: torch.Tensor, *leaves: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


def large_in_float16(backward: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of hidden states in the hundreds and of their matrix, from a `backward` pass and in float64."""
    (x, w, labels, _), found = case(bias=False, dtype=torch.float16), []
    for backend, dtype in (("chunked", torch.float16), ("reference", torch.float64)):
        hidden, weight = ((end.detach() * by).to(dtype).requires_grad_() for end, by in ((x, 300), (w, 0.01)))
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend) * 3
        for _ in range(backward):
            back = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        found.append(back)
    return list(zip(*found, strict=True))
