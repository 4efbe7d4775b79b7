"""`Product`: the record of deferred logits, a head's input and matrix and the steps after their product."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.utils.weak import WeakIdKeyDictionary

from bowline.errors import UsageError
from bowline.functional.deferred.loss_record import LossRecord
from bowline.functional.loss import AdapterTerms, chosen_backend, linear_cross_entropy
from bowline.functional.loss.logits import linear_logits
from bowline.functional.row_shard import is_dtensor

__all__ = ["NO_ADAPTERS", "Product"]

NO_ADAPTERS = AdapterTerms()


@dataclass(frozen=True, eq=False)
class Product:
    """outer tanh(scale (hidden weightᵀ + bias)), without tanh if `outer` is `None`, in `dtype`; `adapters` change
    hidden weightᵀ + bias first.

    hidden (..., D), weight (V, D), bias (V,) or `None`. The context of the head's call is recorded: `cast` is the dtype
    of autocast, if it was on, `grad` whether autograd was on, and `seen` the versions of the three tensors. The context
    in which the product is computed does not matter. Scale and tanh are computed in `stepped`, the dtype of the logits
    when the first of them was applied.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    cast: torch.dtype | None = None
    grad: bool = True
    backend: str = "auto"
    record: LossRecord | None = None
    scale: float = 1.0
    outer: float | None = None
    stepped: torch.dtype | None = None
    adapters: AdapterTerms = NO_ADAPTERS
    seen: tuple[TensorVersion | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.seen:
            object.__setattr__(self, "seen", tuple(map(_seen, self.ends)))

    @property
    def ends(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that get gradients: hidden, weight, bias, and those of the adapters."""
        return self.hidden, self.weight, self.bias, self.adapters.left, self.adapters.right, self.adapters.columns

    def with_ends(self, *ends: torch.Tensor | None) -> Product:
        """The same product of other tensors, in the order of `ends`."""
        hidden, weight, bias, left, right, columns = ends
        assert hidden is not None
        assert weight is not None
        terms = replace(self.adapters, left=left, right=right, columns=columns)
        return replace(self, hidden=hidden, weight=weight, bias=bias, adapters=terms)

    @property
    def is_split(self) -> bool:
        """Whether the weight is a DTensor, whose rows are split over processes."""
        return is_dtensor(self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    @property
    def multiplied(self) -> torch.dtype:
        """The dtype of the product itself."""
        return self.cast or torch.result_type(self.hidden, self.weight)

    def _as_there(self) -> AbstractContextManager[object]:
        self._expect_the_same_ends()
        kind = self.hidden.device.type
        if self.cast is None and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, self.cast, enabled=self.cast is not None)

    def _expect_the_same_ends(self) -> None:
        weight: Any = self.weight
        weight = weight._local_tensor if self.is_split else weight
        if weight.ndim != 2 or weight.untyped_storage().nbytes() < weight.numel() * weight.itemsize:
            raise UsageError(
                "the head's matrix was freed after the head's forward pass, as happens to a head in its own FSDP or "
                "ZeRO-3 unit; expected it to exist when the loss is computed",
                help="do not wrap the head in its own unit, and compute the loss in the model (labels=...)",
            )
        names = ("input", "matrix", "bias", *("adapter",) * 3)
        for name, end, seen in sorted(
            zip(names, self.ends, self.seen, strict=True), key=lambda one: one[0] != "matrix"
        ):
            if _seen(end) != seen:
                raise UsageError(
                    f"the head's {name} has changed since the model ran, so the logits of that run can no longer be "
                    "computed",
                    help="use the logits before the optimizer's step, or copy them (logits + 0)",
                )

    def logits(self) -> torch.Tensor:
        """All logits, (..., V); if the weight is split over processes, gathered, and whole on each.

        Raises:
            UsageError: the matrix is not there any more as it was.
        """
        with self._as_there():
            whole = self.split_logits().full_tensor() if self.is_split else None
            found = self.adapters.applied(F.linear(self.hidden, self.weight, self.bias) if whole is None else whole)
        if self.stepped is not None:
            found = found.to(self.stepped)
        if self.scale != 1.0:
            found = found * self.scale
        if self.outer is not None:
            found = torch.tanh(found) * self.outer
        return found.to(self.dtype)

    def split_logits(self) -> Any:
        """hidden weightᵀ + bias of a weight that is split over processes, as a DTensor that is split by tokens."""
        with self._as_there():
            return linear_logits(self.hidden, self.weight, bias=self.bias)

    def cross_entropy(self, labels: torch.Tensor, **options: Any) -> Any:
        """`torch.nn.functional.cross_entropy` of the logits.

        Raises:
            UsageError: the matrix is not there any more as it was.
        """
        scale = self.scale if self.outer is None else self.scale * self.outer
        casts = torch.is_autocast_enabled(self.hidden.device.type)  # it makes a loss of half precision float32
        dtype = torch.promote_types(self.dtype, torch.float32) if casts else self.dtype
        adapters = None if self.adapters is NO_ADAPTERS else self.adapters
        if self.record is not None:
            self.record.count(chosen_backend(self.hidden, self.weight, adapters=adapters, backend=self.backend))
        with self._as_there(), torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            loss = linear_cross_entropy(
                self.hidden,
                self.weight,
                labels,
                bias=self.bias,
                logit_scale=scale,
                softcap=self.outer,
                adapters=adapters,
                backend=self.backend,
                **options,
            )
        return loss.to(dtype)

    def of(self, tokens: slice) -> Product | None:
        """The logits of some tokens; they use a view of the matrix, so its gradient has the size of all of it.

        `None` if an adapter changes them, or the matrix is split over processes.
        """
        if range(*tokens.indices(len(self.weight))) == range(len(self.weight)):
            return self
        if self.adapters is not NO_ADAPTERS or self.is_split:
            return None
        return self._with(weight=self.weight[tokens], bias=None if self.bias is None else self.bias[tokens])

    def over_positions(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Product:
        """The logits of some of the positions, or of positions in another shape: `change` selects or reshapes them."""
        return self._with(hidden=change(self.hidden), adapters=self.adapters.over_positions(change))

    def plus_product(self, other: Product) -> Product | None:
        """The sum of these logits and those of a thin head, as LoRA adds; `None` if that cannot be recorded."""
        if (
            self.is_split
            or other.is_split
            or other.outer is not None
            or self.outer is not None
            or self.stepped is not None
            or other.adapters.columns is not None
        ):
            return None
        if other.shape != self.shape or self.adapters.columns is not None or other.adapters.left is not None:
            return None
        if other.grad != self.grad or other.cast != self.cast:
            return None
        left, right, bias = other.hidden, other.weight, self.bias
        if other.scale != 1.0:
            left = left * other.scale
        if other.bias is not None:
            bias = other.bias * other.scale if bias is None else bias + other.bias * other.scale
        if bias is not None and bias.dtype != self.weight.dtype:
            return None
        before = self.adapters
        if before.left is not None and before.right is not None:
            left, right = torch.cat([before.left, left], -1), torch.cat([before.right, right], -1)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self._with(bias=bias, adapters=replace(before, left=left, right=right), dtype=dtype)

    def with_columns(self, ids: torch.Tensor, columns: torch.Tensor) -> Product | None:
        """The logits with those of the tokens `ids` (k,) replaced by `columns` (..., k); `None` after another step."""
        if self.stepped is not None or self.adapters is not NO_ADAPTERS or self.is_split:
            return None
        return self._with(adapters=AdapterTerms(ids=ids, columns=columns))

    def _with(self, **ends: Any) -> Product:
        self._expect_the_same_ends()
        return replace(self, seen=(), **ends)

    def to(self, dtype: torch.dtype) -> Product | None:
        """The logits in a dtype; `None` if an earlier cast has already lost digits."""
        before = self.stepped or self.multiplied
        lost = torch.promote_types(before, self.dtype) != self.dtype
        return None if lost and dtype != self.dtype else replace(self, dtype=dtype)

    def times(self, factor: float) -> Product | None:
        """The logits times a number, or `None` if that cannot be recorded."""
        if self.stepped not in (None, self.dtype):
            return None
        if self.outer is not None:
            return replace(self, outer=self.outer * factor) if factor > 0 else None
        return replace(self, scale=self.scale * factor, stepped=self.dtype)

    def tanh(self) -> Product | None:
        """The tanh of the logits, or `None` if that cannot be recorded."""
        if self.outer is not None or self.stepped not in (None, self.dtype):
            return None
        return replace(self, outer=1.0, stepped=self.dtype)

    def plus(self, other: torch.Tensor) -> Product | None:
        """The logits plus a bias (V,), or `None` if that cannot be recorded; another dtype only for a bias of zeros."""
        one_each = 0 < other.ndim <= self.hidden.ndim and other.numel() == self.weight.shape[0] == other.shape[-1]
        learns = other.requires_grad and torch.is_grad_enabled()
        if self.stepped is not None or not one_each or (learns and not self.grad):
            return None
        if self.bias is not None and is_dtensor(self.bias):
            return None
        if not self.dtype == other.dtype == self.multiplied:
            wide = torch.promote_types(self.dtype, other.dtype)
            return self.to(wide) if not other.requires_grad and _is_zero(other) else None
        bias = other.reshape(-1)
        return self._with(bias=bias.clone() if self.bias is None else self.bias + bias)  # a copy of its present values


class TensorVersion(NamedTuple):
    """A tensor's properties at one moment; `version` counts in-place changes, `None` for inference tensors."""

    version: int | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


_IS_ZERO = WeakIdKeyDictionary()
"""By bias: its version, and whether all its entries are 0."""


def _is_zero(bias: torch.Tensor) -> bool:
    """Whether a bias adds nothing but, after autocast, widens the logits to float32, as BART's `final_logits_bias`.

    Read once for each version of the bias, because on a GPU reading waits for the queue.
    """
    version = None if bias.is_inference() else bias._version
    known = _IS_ZERO.get(bias)
    if known is None or version is None or known[0] != version:
        known = _IS_ZERO[bias] = (version, not bias.any().item())
    found: bool = known[1]
    return found


def _seen(tensor: torch.Tensor | None) -> TensorVersion | None:
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return TensorVersion(version, tensor.shape, tensor.dtype, tensor.device)
