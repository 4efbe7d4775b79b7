"""`LinearCrossEntropy`: the loss as a module, its options fixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.functional.loss.cross_entropy import linear_cross_entropy

__all__ = ["LinearCrossEntropy"]


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options given once: `loss(hidden, weight, labels, bias=None)`.

    It has no parameters: the caller passes the head's matrix. With `shift=True` it is a causal model's loss: hidden
    (..., T, D) at t predicts labels (..., T) at t + 1; hidden is not copied, the last position has no label.

    Raises:
        UsageError: an option that `linear_cross_entropy` does not have.

    Example:
        >>> loss = LinearCrossEntropy(z_loss=1e-4, shift=True)
        >>> weight = torch.zeros(9, 4)
        >>> round(loss(torch.zeros(2, 3, 4), weight, torch.tensor([[1, 2, 3], [4, 5, -100]])).item(), 3)
        2.198
        >>> loss
        LinearCrossEntropy(z_loss=0.0001, shift=True)
    """

    class_weight: torch.Tensor | None

    def __init__(self, *, shift: bool = False, **options: Any) -> None:
        super().__init__()
        known = set(linear_cross_entropy.__kwdefaults__ or ()) - {"bias"}  # the bias is given with the weight
        strange = sorted(set(options) - known)
        if strange:
            raise UsageError(f"{strange[0]!r}: expected an option of linear_cross_entropy, {', '.join(sorted(known))}")
        self.register_buffer("class_weight", options.pop("class_weight", None), persistent=False)
        self.shift = shift
        self.options = options

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        if self.shift and not labels.ndim:
            raise UsageError("labels (): expected (..., T), to be shifted", help="shift=False")
        if self.shift and labels.shape[-1]:
            labels = nn.functional.pad(labels[..., 1:], (0, 1), value=self.options.get("ignore_index", -100))
        return linear_cross_entropy(hidden, weight, labels, bias=bias, class_weight=self.class_weight, **self.options)

    def extra_repr(self) -> str:
        given = {**self.options, **({"shift": True} if self.shift else {})}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
