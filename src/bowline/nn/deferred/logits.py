"""Logits that are not computed until somebody needs them: a head's input and matrix, in the form of a tensor.

`cross_entropy` of what was noted is `linear_cross_entropy`, which needs no logits all at once; anything that is no step
of `bowline.nn.deferred.steps` makes them, and goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from bowline.nn.deferred.compiler import uncompiled
from bowline.nn.deferred.product import Product
from bowline.nn.deferred.steps import STEPS

__all__ = ["DeferredLogits"]


class DeferredLogits(torch.Tensor):
    """A tensor (..., V) as far as anybody asks; `made()` computes it, once.

    It has a place in the graph, for whoever looks at what leaves a model: DDP, FSDP. Where somebody does, or has put
    something between that place and this tensor, gradients have to come by there: no step with one is noted any more.
    """

    product: Product
    _made: torch.Tensor | None
    _watched: bool

    @staticmethod
    def __new__(cls, product: Product) -> DeferredLogits:
        place: Any = _Place.apply
        with torch.set_grad_enabled(product.grad):
            found: DeferredLogits = place(product, product.hidden, product.weight, product.bias)
        return found

    @staticmethod
    def _without_a_place(product: Product) -> DeferredLogits:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        self: DeferredLogits = wrapper(DeferredLogits, product.shape, dtype=product.dtype, device=product.hidden.device)
        self.product, self._made, self._watched = product, None, False
        return self

    def made(self) -> torch.Tensor:
        """The logits."""
        if self._made is None:
            product, through_its_place = self.product, cast("Any", _Made.apply)
            grad = product.grad or self.requires_grad
            with torch.inference_mode(product.hidden.is_inference()), torch.set_grad_enabled(grad):
                self._made = product.logits() if self._unseen() else through_its_place(self)
        return self._made

    def _may_note(self) -> bool:
        return self._unseen() or not torch.is_grad_enabled()

    def _unseen(self) -> bool:
        """Whether gradients need not come by its place in the graph."""
        with torch._C.DisableTorchFunctionSubclass():
            place = self.grad_fn
        return not self._watched and (place is None or isinstance(place, _Place._backward_cls))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.made().detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made().detach().__reduce_ex__(protocol)

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first: Any = args[0] if args else None
        if func in METADATA or (func in WATCHING and isinstance(first, DeferredLogits) and first._made is None):
            with torch._C.DisableTorchFunctionSubclass():
                first._watched |= func in WATCHING
                return func(*args, **kwargs)
        if func in STEPS and isinstance(first, DeferredLogits) and first._made is None and first._may_note():
            found = STEPS[func](first.product, *args[1:], **kwargs)
            if isinstance(found, Product):
                return DeferredLogits(replace(found, grad=found.grad and torch.is_grad_enabled()))
            if found is not None:
                return found
        return func(*map(_made, args), **{key: _made(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Below autograd, which goes by the places in the graph."""
        return func(*map(_values, args), **{key: _values(value) for key, value in (kwargs or {}).items()})


class _Place(torch.autograd.Function):
    """From hidden, weight and bias to logits that are not computed."""

    @staticmethod
    def forward(ctx: Any, product: Product, *_: torch.Tensor | None) -> DeferredLogits:
        ctx.product = product
        ctx.set_materialize_grads(False)
        return DeferredLogits._without_a_place(product)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        product, wanted = ctx.product, ctx.needs_input_grad[1:]
        if gradient is None:
            return None, None, None, None
        with torch.enable_grad():
            ends = [
                one if one is None else one.detach().requires_grad_(asked)
                for one, asked in zip((product.hidden, product.weight, product.bias), wanted, strict=True)
            ]
            logits = replace(product, hidden=ends[0], weight=ends[1], bias=ends[2]).logits()
        found = iter(
            torch.autograd.grad(logits, [one for one in ends if one is not None and one.requires_grad], gradient)
        )
        return None, *(next(found) if asked else None for asked in wanted)


class _Made(torch.autograd.Function):
    """The logits, whose gradient comes by the place of those that were not computed."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits) -> torch.Tensor:
        return deferred.product.logits()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _made(value: Any) -> Any:
    return _replaced(value, DeferredLogits.made)


def _values(value: Any) -> Any:
    return _replaced(value, lambda one: one.product.logits() if one._made is None else one._made.detach())


def _replaced(value: Any, by: Callable[[DeferredLogits], torch.Tensor]) -> Any:
    if isinstance(value, DeferredLogits):
        return by(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, DeferredLogits) for one in value):
        return type(value)(_replaced(one, by) for one in value)
    return value


METADATA = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.__len__,
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape",
                "ndim",
                "dtype",
                "device",
                "layout",
                "is_cuda",
                "is_meta",
                "is_sparse",
                "is_quantized",
                "is_leaf",
                "requires_grad",
                "_base",
            )
        ),
    }
)
GRAD_FN: Any = torch.Tensor.grad_fn
WATCHING = frozenset({GRAD_FN.__get__, torch.Tensor.register_hook})
"""Who asks for these may put something into the graph there."""
