"""The tensor operations between head and loss that are recorded in a `Product` instead of run.

Each step takes a `Product` and the arguments of the tensor operation, by torch's names; deferred logits among them are
given as their `Product`. It returns the resulting
product (the same one if torch would return the same tensor), a loss, or `None` if it cannot be recorded and the logits
have to be computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.deferred.head_product import Product

__all__ = ["SAME", "SUMS", "VIEWS", "noted"]


def _shaped(product: Product, *shape: Any) -> Product | None:
    sizes = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    vocab = product.weight.shape[0]
    if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] not in (vocab, -1):
        return None
    if sizes[-1] == -1:  # -1 has to stand for the vocabulary
        rows = 1
        for size in sizes[:-1]:
            rows *= size
        if rows * vocab != product.hidden.numel() // product.hidden.shape[-1] * vocab:
            return None
    return product.over_positions(lambda one: one.reshape(*sizes[:-1], one.shape[-1]))


def _flattened(product: Product, start_dim: int = 0, end_dim: int = -1) -> Product | None:
    depth = product.hidden.ndim
    if end_dim % depth >= depth - 1:
        return None
    return product.over_positions(lambda one: one.flatten(start_dim, end_dim))


def _picked(product: Product, index: Any) -> Product | None:
    """Selects rows, and a slice of the last axis, because a vocabulary may be padded."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    depth = product.hidden.ndim
    named = len(parts) - (Ellipsis in parts)
    last_is_named = named == depth or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if last_is_named:
        if not isinstance(parts[-1], slice):
            return None
        some = product.of(parts[-1])
        if some is None:
            return None
        product, index = some, (*parts[:-1], slice(None))
    return product.over_positions(lambda one: one[index])


def _cast(product: Product, *args: Any, **kwargs: Any) -> Product | None:
    given = [*args, *kwargs.values()]
    dtypes = [one for one in given if isinstance(one, torch.dtype)]
    others = [one for one in given if not isinstance(one, (torch.dtype, bool))]
    same = all(isinstance(one, (str, torch.device)) and torch.device(one) == product.hidden.device for one in others)
    if not same or True in given or len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    return _in(product, dtypes[0]) if dtypes else product


def _wider(product: Product, memory_format: Any = None) -> Product | None:
    return _in(product, torch.float32)


def _in(product: Product, dtype: torch.dtype) -> Product | None:
    return product if dtype == product.dtype else product.to(dtype)


def _same(product: Product, *, memory_format: Any = None) -> Product:
    return product


def _times(product: Product, other: Any) -> Product | None:
    return product.times(float(other)) if isinstance(other, (int, float)) else None


def _over(product: Product, other: Any) -> Product | None:
    return product.times(1 / other) if isinstance(other, (int, float)) and other else None


def _plus(product: Product, other: Any) -> Product | None:
    if isinstance(other, Product):
        return product.plus_product(other)
    return product.plus(other) if type(other) in (torch.Tensor, torch.nn.Parameter) else None


def _capped(product: Product) -> Product | None:
    return product.tanh()


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
    if weight is not None or size_average is not None or reduce is not None:  # rarely used or deprecated
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return product.cross_entropy(target, **options)


_STEPS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: _shaped,
    torch.Tensor.reshape: _shaped,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _picked,
    torch.Tensor.contiguous: _same,
    torch.Tensor.clone: _same,
    torch.clone: _same,
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
VIEWS = frozenset(
    (torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.flatten, torch.Tensor.__getitem__)
)
"""Operations that return a view if possible."""
SUMS = frozenset((torch.Tensor.add, torch.Tensor.__add__, torch.add))
"""Operations whose second argument may be deferred logits too, given as their product."""
SAME = frozenset((torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float))
"""Operations that return the same tensor if nothing has to be done."""
_SIGNATURES = {step: inspect.signature(step) for step in set(_STEPS.values())}


def noted(function: Any, product: Product, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation on a product; `None` if it is not a recorded step, or has unknown arguments."""
    step = _STEPS.get(function)
    if step is None:
        return None
    try:
        _SIGNATURES[step].bind(product, *args, **kwargs)
    except TypeError:
        return None
    return step(product, *args, **kwargs)
