"""What logits are, as they were noted: a head's input and matrix, and what a model did to their product."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.nn.loss import linear_cross_entropy

__all__ = ["Product", "version_of"]


@dataclass(frozen=True, eq=False)
class Product:
    """outer tanh(scale (hidden weightᵀ + bias)), or without tanh where `outer` is `None`, in `dtype`.

    hidden (..., D), weight (V, D), bias (V,) or `None`. Of where the head stood: `cast` is what autocast multiplied in,
    if it was on, `grad` whether autograd was, and `version` counts the changes of the matrix in place. What is on where
    the product is made does not matter.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    cast: torch.dtype | None = None
    grad: bool = True
    version: int | None = None
    backend: str = "auto"
    scale: float = 1.0
    outer: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def _as_there(self) -> AbstractContextManager[object]:
        self._expect_the_same_matrix()
        kind = self.hidden.device.type
        if self.cast is None and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, self.cast, enabled=self.cast is not None)

    def _expect_the_same_matrix(self) -> None:
        weight = self.weight
        if self.version not in (None, version_of(weight)):
            raise UsageError(
                "the head's matrix has changed since the model ran, so its logits of then cannot be computed any more",
                help="use the logits before the optimizer's step, or copy them (logits + 0)",
            )
        if weight.ndim != 2 or weight.untyped_storage().nbytes() < weight.numel() * weight.itemsize:
            raise UsageError(
                "the head's matrix was freed after the head's forward pass, as a unit of FSDP or ZeRO-3 of its own is; "
                "expected it to be there when the loss is computed",
                help="leave the head to the unit of the whole model, and compute the loss in the model (labels=...)",
            )

    def logits(self) -> torch.Tensor:
        """All of them, (..., V).

        Raises:
            UsageError: the matrix is not there any more as it was.
        """
        with self._as_there():
            found = F.linear(self.hidden, self.weight, self.bias)
        if self.scale != 1.0:
            found = found * self.scale
        if self.outer is not None:
            found = torch.tanh(found) * self.outer
        return found.to(self.dtype)

    def cross_entropy(self, labels: torch.Tensor, **options: Any) -> Any:
        """`torch.nn.functional.cross_entropy` of the logits.

        Raises:
            UsageError: the matrix is not there any more as it was.
        """
        scale = self.scale if self.outer is None else self.scale * self.outer
        casts = torch.is_autocast_enabled(self.hidden.device.type)  # it makes a loss of half precision float32
        dtype = torch.promote_types(self.dtype, torch.float32) if casts else self.dtype
        with self._as_there(), torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            loss = linear_cross_entropy(
                self.hidden,
                self.weight,
                labels,
                bias=self.bias,
                logit_scale=scale,
                softcap=self.outer,
                backend=self.backend,
                **options,
            )
        return loss.to(dtype)

    def of(self, tokens: slice) -> Product:
        """The logits of some tokens; a view of the matrix, so its gradient is as large as all of it."""
        if range(*tokens.indices(len(self.weight))) == range(len(self.weight)):
            return self
        return replace(self, weight=self.weight[tokens], bias=None if self.bias is None else self.bias[tokens])

    def times(self, factor: float) -> Product | None:
        """The logits times a number, where that can be noted."""
        if self.outer is not None:
            return replace(self, outer=self.outer * factor) if factor > 0 else None
        return replace(self, scale=self.scale * factor)

    def plus(self, other: torch.Tensor) -> Product | None:
        """The logits plus a bias (V,), where that can be noted."""
        one_each = other.numel() == self.weight.shape[0] == other.shape[-1] if other.ndim else False
        if self.outer is not None or self.scale != 1.0 or not one_each or other.dtype != self.weight.dtype:
            return None
        bias = other.reshape(-1)
        return replace(self, bias=bias if self.bias is None else self.bias + bias)


def version_of(weight: torch.Tensor) -> int | None:
    """How often it was changed in place, where that is counted."""
    return None if weight.is_inference() else weight._version
