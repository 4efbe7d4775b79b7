"""`DeferredLogits`: a tensor that holds a head's input and matrix, and computes the logits when they are needed.

Steps listed in `bowline.functional.deferred.logit_operations` are recorded instead of run, and `cross_entropy` of the
result is `linear_cross_entropy`, which never needs all logits at once. Any other operation computes the logits and
then runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.deferred.graph_breaks import uncompiled
from bowline.functional.deferred.head_product import Product
from bowline.functional.deferred.logit_operations import SAME, SUMS, VIEWS, noted

__all__ = ["DeferredLogits"]


class DeferredLogits(torch.Tensor):
    """Behaves like a tensor of logits (..., V); `made()` computes them, once.

    It has a node in the autograd graph, for code that inspects the outputs of a model, such as DDP and FSDP. If such
    code asks for the node, or inserts another one after it, gradients have to pass through it: from then on, steps
    that need gradients are not recorded.

    A view is a product of its own, so that only its own logits are computed. When a view or its base is written to,
    the view becomes a real view of the base's memory.
    """

    product: Product
    _made: torch.Tensor | None
    _made_version: int | None
    _layout: torch.Tensor
    """A meta tensor with the size and strides that the logits would have."""
    _view: _View | None
    _in_its_memory: bool
    """Whether the computed logits are a real view of the base's memory."""
    _watched: bool

    @staticmethod
    def __new__(cls, product: Product) -> DeferredLogits:
        place: Any = _Place.apply
        with torch.set_grad_enabled(product.grad):
            found: DeferredLogits = place(product, *product.ends)
        return found

    @staticmethod
    def _without_a_place(product: Product) -> DeferredLogits:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        self: DeferredLogits = wrapper(DeferredLogits, product.shape, dtype=product.dtype, device=product.hidden.device)
        self.product, self._watched = product, False
        self._layout = torch.empty(product.shape, device="meta")
        self._made = self._made_version = self._view = None
        self._in_its_memory = False
        return self

    def made(self) -> torch.Tensor:
        """The logits."""
        if self._view is not None and self._is_a_copy_of_its_view() and self._view.of._was_written():
            self._become_the_view(self._view)
        if self._made is None:
            with self._as_there():
                alone = self._unseen() and not _saving_is_watched()
                self._keep(self.product.logits() if alone else _Made.of(self))
        elif not self._made.requires_grad and self._returned_by_a_function():
            self._put_at_its_place()
        return cast("torch.Tensor", self._made)

    def made_to_be_written(self) -> torch.Tensor:
        """The logits in memory that may be written to: a view's in the memory of its base."""
        if self._view is not None and self._is_a_copy_of_its_view():
            self._view.of.made_to_be_written()
            self._become_the_view(self._view)
        return self.made()

    def with_columns(self, ids: torch.Tensor, columns: torch.Tensor) -> DeferredLogits | None:
        """The logits with those of the tokens `ids` (k,) replaced by `columns` (..., k); `None` if they are needed."""
        product = self.product.with_columns(ids, columns) if self._made is None and self._unseen() else None
        return None if product is None else DeferredLogits(product)

    def _put_at_its_place(self) -> None:
        """Attaches logits that were computed without autograd to the graph node that a Function has added since."""
        written = self._was_written()
        with self._as_there():
            self._keep(_Made.of(self))
        if written:
            self._made_version = None

    def _become_the_view(self, view: _View) -> None:
        with self._as_there():
            self._keep(view.function(view.of.made(), *view.args, **view.kwargs))
        self._in_its_memory = True

    @contextmanager
    def _as_there(self) -> Iterator[None]:
        with torch._C.DisableTorchFunctionSubclass():
            grad = self.product.grad or self.requires_grad
        with torch.inference_mode(self.product.hidden.is_inference()), torch.set_grad_enabled(grad):
            yield

    def _keep(self, made: torch.Tensor) -> None:
        self._made, self._made_version = made, _version(made)

    def _is_a_copy_of_its_view(self) -> bool:
        return self._view is not None and not self._in_its_memory

    def _may_be_written_by(self, other: Any) -> bool:
        """Whether `other` shares memory with logits that copy this view, so that writing to it would miss the base."""
        return self._is_a_copy_of_its_view() and self._unseen() and _shares_memory(other, self.made())

    def _was_written(self) -> bool:
        if self._view is not None:
            return self._in_its_memory or self._view.of._was_written()
        return self._made is not None and (self._made_version is None or _version(self._made) != self._made_version)

    def _may_note(self, step: Any) -> bool:
        if self._was_written():
            return False
        if self._made is not None and (
            self._view is None or step not in VIEWS | SAME
        ):  # a view's memory belongs to its base
            return False
        return self._unseen() or not torch.is_grad_enabled()

    def _unseen(self) -> bool:
        """Whether gradients may bypass its node in the graph."""
        return not self._watched and not self._returned_by_a_function()

    def _returned_by_a_function(self) -> bool:
        """Whether a Function, such as one that computes without autograd, has added a node after its own."""
        with torch._C.DisableTorchFunctionSubclass():
            place = self.grad_fn
        return place is not None and not isinstance(place, _Place._backward_cls)

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
        if isinstance(first, DeferredLogits) and first._made is None and (func in METADATA or func in WATCHING):
            with torch._C.DisableTorchFunctionSubclass():
                first._watched |= func in WATCHING
                return func(*args, **kwargs)
        for written in _deferred_in((first if _writes(func, kwargs) else None, kwargs.get("out"))):
            written.made_to_be_written()
        if isinstance(first, DeferredLogits) and first._may_note(func):
            rest = [_recorded(one) for one in args[1:]] if func in SUMS else args[1:]
            found = noted(func, first.product, rest, kwargs)
            if isinstance(found, Product):
                return first._followed_by(found, func, args[1:], kwargs)
            if found is not None:
                return found

        def done() -> Any:
            return func(*map(_made, args), **{key: _made(value) for key, value in kwargs.items()})

        asked = [one for one in _deferred_in([*args, *kwargs.values()]) if one._made is None]
        found = done()
        _tell(asked, func, args, found)
        if isinstance(first, DeferredLogits) and first._may_be_written_by(found):
            first.made_to_be_written()
            return done()
        return found

    def _followed_by(
        self, product: Product, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> DeferredLogits:
        """The result of a step: this tensor itself, a view of it, or a new tensor, as torch would return."""
        copies = step is torch.Tensor.contiguous and not self._layout.is_contiguous()
        if step in SAME and product is self.product and not copies:
            return self
        found = DeferredLogits(replace(product, grad=product.grad and torch.is_grad_enabled()))
        if step in VIEWS:
            found._layout = step(self._layout, *args, **kwargs)
            if found._layout.untyped_storage()._cdata == self._layout.untyped_storage()._cdata:
                found._view = _View(self, step, args, kwargs)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs operations below autograd on the computed logits."""
        return func(*map(_values, args), **{key: _values(value) for key, value in (kwargs or {}).items()})


class _View(NamedTuple):
    """The base of a view, and the operation that makes the view."""

    of: DeferredLogits
    function: Callable[..., torch.Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class _Place(torch.autograd.Function):
    """The graph node from hidden, weight and bias to deferred logits."""

    @staticmethod
    def forward(ctx: Any, product: Product, *_: torch.Tensor | None) -> DeferredLogits:
        ctx.product = product
        ctx.set_materialize_grads(False)
        return DeferredLogits._without_a_place(product)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        product, wanted, again = ctx.product, ctx.needs_input_grad[1:], torch.is_grad_enabled()  # create_graph=True
        if gradient is None:
            return None, *(None for _ in wanted)
        with torch.enable_grad():
            ends = [
                one if one is None or again else one.detach().requires_grad_(asked)
                for one, asked in zip(product.ends, wanted, strict=True)
            ]
            logits = product.with_ends(*ends).logits()
        asked_for = [one for one, asked in zip(ends, wanted, strict=True) if asked]
        found = iter(torch.autograd.grad(logits, asked_for, gradient, create_graph=again))
        return None, *(next(found) if asked else None for asked in wanted)


class _Made(torch.autograd.Function):
    """Computes the logits; their gradient passes through the node of the deferred logits."""

    @staticmethod
    def of(deferred: DeferredLogits) -> torch.Tensor:
        apply: Any = _Made.apply
        found: torch.Tensor = apply(deferred)
        return found

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits) -> torch.Tensor:
        found = deferred.product.logits() if deferred._made is None else deferred._made.detach()
        alone: Any = found.new_empty(0)
        return cast("torch.Tensor", alone.set_(found))  # the same memory, but not a view, so that it can be written to

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _tell(asked: Sequence[DeferredLogits], function: Any, args: Sequence[Any], found: Any) -> None:
    """Tell the record that logits were computed for this function, if a loss may follow from what it returned."""
    records = {id(record): record for one in asked if (record := one.product.record) is not None}
    learns = isinstance(found, torch.Tensor) and found.requires_grad
    if not records or not (learns or function is F.cross_entropy):
        return
    shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor) and not isinstance(one, DeferredLogits)]
    name = getattr(function, "__name__", str(function)).strip("_")
    for record in records.values():
        record.fall_back(f"{name}{f' with a tensor {shapes[0]}' if shapes else ''} between head and loss")


def _recorded(value: Any) -> Any:
    """The product of deferred logits that nothing has needed, and whose gradients need not pass through their node."""
    fresh = isinstance(value, DeferredLogits) and value._made is None and value._view is None
    return value.product if fresh and (value._unseen() or not torch.is_grad_enabled()) else value


def _made(value: Any) -> Any:
    return _replaced(value, DeferredLogits.made)


def _values(value: Any) -> Any:
    return _replaced(value, lambda one: one.product.logits() if one._made is None else one._made.detach())


def _replaced(value: Any, by: Callable[[DeferredLogits], torch.Tensor]) -> Any:
    if isinstance(value, DeferredLogits):
        return by(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, DeferredLogits) for one in value):
        return [_replaced(one, by) for one in value]
    return value


def _deferred_in(value: Any) -> Iterator[DeferredLogits]:
    if isinstance(value, DeferredLogits):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _deferred_in(one)


def _shares_memory(found: Any, made: torch.Tensor) -> bool:
    if isinstance(found, (list, tuple)):
        return any(_shares_memory(one, made) for one in found)
    if not isinstance(found, torch.Tensor) or isinstance(found, DeferredLogits) or found.layout != torch.strided:
        return False
    same: bool = found.untyped_storage()._cdata == made.untyped_storage()._cdata
    return same


def _version(tensor: torch.Tensor) -> int | None:
    """The count of in-place changes; `None` for an inference tensor, which has no count."""
    return None if tensor.is_inference() else tensor._version


def _writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(function, "__name__", "").partition(".")[0]
    return name in WRITING or (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))


def _saving_is_watched() -> bool:
    """Whether hooks on saved tensors are active: checkpointing computes them twice, deferred logits only once."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
WRITING = {"__setitem__", "__set__", "register_hook", "retain_grad", *(f"__i{name}__" for name in OPERATORS)}
"""Methods that change a tensor, or affect its gradient."""
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
"""A caller that uses these may insert a node into the graph there."""
