"""The forward pass of a head that leaves its logits to whoever needs them."""

from __future__ import annotations

import torch
from torch import nn

from bowline.nn.deferred.compiler import in_one_graph, uncompiled
from bowline.nn.deferred.logits import DeferredLogits
from bowline.nn.deferred.product import Product, version_of

__all__ = ["DeferringHead"]

PLAIN = (torch.Tensor, nn.Parameter)
"""A head of others, as of DTensor where it is split over devices, computes its logits."""


class DeferringHead:
    """`forward` in the place of the head's own; an object, so that a copy of the model has its copy of the head."""

    def __init__(self, head: nn.Linear, backend: str) -> None:
        self.head, self.backend = head, backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch gives it
        head = self.head
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if torch.compiler.is_compiling():
            traced = in_one_graph()
        if traced or not all(type(one) in PLAIN for one in (input, head.weight, head.bias) if one is not None):
            own: torch.Tensor = type(head).forward(head, input)
            return own
        return _deferred(input, head, self.backend)


@uncompiled
def _deferred(hidden: torch.Tensor, head: nn.Linear, backend: str) -> DeferredLogits:
    kind = hidden.device.type
    narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    cast = torch.get_autocast_dtype(kind) if narrow else None
    dtype = cast or torch.result_type(hidden, head.weight)
    grad, version = torch.is_grad_enabled(), version_of(head.weight)
    return DeferredLogits(Product(hidden, head.weight, head.bias, dtype, cast, grad, version, backend))
