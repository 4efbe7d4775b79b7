"""Logits that are not computed until somebody needs them: a head's input and matrix, in the form of a tensor.

Models of every library do few things with logits between the head and the loss: a cast, a scale, a softcap, a bias, a
view. Those are noted here and not done. `cross_entropy` of what was noted is `linear_cross_entropy`, which needs no
logits all at once; anything else makes them, and goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.nn.loss import linear_cross_entropy

__all__ = ["DeferredLogits", "Product"]


@dataclass(frozen=True, eq=False)
class Product:
    """outer tanh(scale (hidden weightᵀ + bias)), or without tanh where `outer` is `None`, in `dtype`.

    hidden (..., D), weight (V, D), bias (V,) or `None`. `cast`: what autocast multiplied in where the head stood, if it
    was on there; whether it is on where the product is made does not matter.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    cast: torch.dtype | None = None
    backend: str = "auto"
    scale: float = 1.0
    outer: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def _as_there(self) -> AbstractContextManager[object]:
        kind = self.hidden.device.type
        if self.cast is None and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, self.cast, enabled=self.cast is not None)

    def logits(self) -> torch.Tensor:
        """All of them, (..., V)."""
        with self._as_there():
            found = F.linear(self.hidden, self.weight, self.bias)
        if self.scale != 1.0:
            found = found * self.scale
        if self.outer is not None:
            found = torch.tanh(found) * self.outer
        return found.to(self.dtype)

    def cross_entropy(self, labels: torch.Tensor, **options: Any) -> Any:
        """`torch.nn.functional.cross_entropy` of the logits."""
        scale = self.scale if self.outer is None else self.scale * self.outer
        casts = torch.is_autocast_enabled(self.hidden.device.type)  # it makes a loss of half precision float32
        dtype = torch.promote_types(self.dtype, torch.float32) if casts else self.dtype
        with self._as_there():
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
        if self.outer is not None or self.scale != 1.0 or not one_each:
            return None
        bias = other.reshape(-1).to(self.weight.dtype)
        return replace(self, bias=bias if self.bias is None else self.bias + bias)


class DeferredLogits(torch.Tensor):
    """A tensor (..., V) as far as anybody asks; `made()` computes it, once."""

    product: Product
    _made: torch.Tensor | None

    @staticmethod
    def __new__(cls, product: Product) -> DeferredLogits:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        self: DeferredLogits = wrapper(cls, product.shape, dtype=product.dtype, device=product.hidden.device)
        self.product = product
        self._made = None
        return self

    def made(self) -> torch.Tensor:
        """The logits."""
        if self._made is None:
            self._made = self.product.logits()
        return self._made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.made().detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in NOTED and args and isinstance(args[0], DeferredLogits) and args[0]._made is None:
            found = NOTED[func](args[0].product, *args[1:], **kwargs)
            if found is not None:
                return DeferredLogits(found) if isinstance(found, Product) else found
        return func(*map(_made, args), **{key: _made(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*map(_made, args), **{key: _made(value) for key, value in (kwargs or {}).items()})


def _made(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.made()
    if isinstance(value, (list, tuple)) and any(isinstance(one, DeferredLogits) for one in value):
        return type(value)(map(_made, value))
    return value


def _shaped(product: Product, *shape: Any, **_: Any) -> Product | None:
    sizes = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    vocab = product.weight.shape[0]
    if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] not in (vocab, -1):
        return None
    if sizes[-1] == -1:  # what is left for it has to be the vocabulary
        rows = 1
        for size in sizes[:-1]:
            rows *= size
        if rows * vocab != product.hidden.numel() // product.hidden.shape[-1] * vocab:
            return None
    return replace(product, hidden=product.hidden.reshape(*sizes[:-1], product.hidden.shape[-1]))


def _flattened(product: Product, first: int = 0, last: int = -1) -> Product | None:
    depth = product.hidden.ndim
    if last % depth >= depth - 1:
        return None
    return replace(product, hidden=product.hidden.flatten(first, last))


def _picked(product: Product, index: Any) -> Product | None:
    """Rows, and of the last axis a slice: a vocabulary may be padded."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
        return None
    depth = product.hidden.ndim
    named = len(parts) - (Ellipsis in parts)
    last_is_named = named == depth or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if last_is_named:
        if not isinstance(parts[-1], slice):
            return None
        product, index = product.of(parts[-1]), (*parts[:-1], slice(None))
    return replace(product, hidden=product.hidden[index])


def _cast(product: Product, *args: Any, **kwargs: Any) -> Product | None:
    given = [*args, *kwargs.values()]
    dtypes = [one for one in given if isinstance(one, torch.dtype)]
    others = [one for one in given if not isinstance(one, (torch.dtype, bool))]
    same = all(isinstance(one, (str, torch.device)) and torch.device(one) == product.hidden.device for one in others)
    if not same or kwargs.get("copy") or len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    return replace(product, dtype=dtypes[0]) if dtypes else product


def _wider(product: Product) -> Product:
    return replace(product, dtype=torch.float32)


def _same(product: Product, **_: Any) -> Product:
    return product


def _times(product: Product, factor: Any) -> Product | None:
    return product.times(float(factor)) if isinstance(factor, (int, float)) else None


def _over(product: Product, divisor: Any) -> Product | None:
    return product.times(1 / divisor) if isinstance(divisor, (int, float)) and divisor else None


def _plus(product: Product, other: Any) -> Product | None:
    return product.plus(other) if isinstance(other, torch.Tensor) and type(other) is not DeferredLogits else None


def _capped(product: Product) -> Product | None:
    return replace(product, outer=1.0) if product.outer is None else None


def _lost(
    product: Product,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if product.hidden.ndim != 2 or target.ndim != 1 or target.dtype != torch.int64:
        return None
    if weight is not None or size_average is not None or reduce is not None:  # rare, or old
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return product.cross_entropy(target, **options)


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
            )
        ),
    }
)
NOTED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: _shaped,
    torch.Tensor.reshape: _shaped,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _picked,
    torch.Tensor.contiguous: _same,
    torch.Tensor.to: _cast,
    torch.Tensor.float: _wider,
    torch.Tensor.mul: _times,
    torch.Tensor.__mul__: _times,
    torch.Tensor.__rmul__: _times,
    torch.mul: _times,
    torch.Tensor.div: _over,
    torch.Tensor.__truediv__: _over,
    torch.div: _over,
    torch.Tensor.add: _plus,
    torch.Tensor.__add__: _plus,
    torch.add: _plus,
    torch.Tensor.tanh: _capped,
    torch.tanh: _capped,
    F.cross_entropy: _lost,
}
