"""A head that returns deferred logits, computed only when something needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad

from bowline.functional.deferred.deferred_logits import DeferredLogits
from bowline.functional.deferred.graph_breaks import in_one_graph, uncompiled
from bowline.functional.deferred.head_product import Product
from bowline.functional.deferred.loss_record import LossRecord
from bowline.functional.deferred.split_logits import SplitDeferredLogits
from bowline.functional.kernels.function_transforms import in_torch_func
from bowline.functional.row_shard import RowShard, is_dtensor

__all__ = ["DeferringHead"]

PLAIN = (torch.Tensor, nn.Parameter)
"""Tensor classes whose logits are deferred, beside DTensor weights whose rows are split over processes."""


class DeferringHead(nn.Linear):
    """A mixin before a Linear's class: returns `DeferredLogits` instead of computing the logits.

    Attributes:
        loss_backend: the `backend` argument of `linear_cross_entropy`.
        loss_record: counts losses and full logits.
    """

    loss_backend: ClassVar[str] = "auto"
    loss_record: LossRecord | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch gives it
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if torch.compiler.is_compiling():
            traced = in_one_graph()
        elif in_torch_func() or getattr(forward_ad, "_current_level", -1) >= 0 or input.device.type == "meta":
            traced = True
        if traced:
            if torch.compiler.is_compiling() and torch.is_grad_enabled():
                _warn_of_one_graph()
            return super().forward(input)
        weight, bias = self.weight, self.bias  # read once: a parametrized weight is computed at each access
        if RowShard.fits(weight) and 0 not in input.shape[-1:]:
            return _deferred(input, weight, bias, self.loss_backend, self.loss_record)
        if 0 in input.shape[-1:] or not all(type(one) in PLAIN for one in (input, weight, bias) if one is not None):
            kinds = {type(one).__name__ for one in (input, weight, bias) if one is not None and type(one) not in PLAIN}
            if kinds and self.loss_record is not None and torch.is_grad_enabled():
                _fall_back(self.loss_record, f"tensors of the class {', '.join(sorted(kinds))} at the head")
            return super().forward(input)
        return _deferred(input, weight, bias, self.loss_backend, self.loss_record)


def _warn() -> bool:
    """Warns while a graph that has to be whole is traced; a graph has no place for a record."""
    LossRecord().fall_back("a single graph (fullgraph=True, or an export)")
    return True


_warn_of_one_graph: Callable[[], bool] = torch.compiler.assume_constant_result(_warn)


@uncompiled
def _fall_back(record: LossRecord, reason: str) -> None:
    record.fall_back(reason)


@uncompiled
def _deferred(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backend: str, record: LossRecord | None
) -> DeferredLogits:
    split = is_dtensor(hidden)
    if split:
        hidden = RowShard.of(weight).gathered(hidden)
    kind = hidden.device.type
    narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    cast = torch.get_autocast_dtype(kind) if narrow else None
    dtype = cast or torch.result_type(hidden, weight)
    product = Product(hidden, weight, bias, dtype, cast, torch.is_grad_enabled(), backend, record)
    return SplitDeferredLogits.of(product) if split else DeferredLogits(product)
