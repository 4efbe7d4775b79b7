"""The input end of a tied matrix: a lookup whose gradient is added to the output head's, in the head's own buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.kernels.function_transforms import in_torch_func
from bowline.functional.kernels.row_sums import add_rows, summed_rows
from bowline.functional.shared_gradient import offer, take

__all__ = ["tied_embedding"]


def tied_embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[ids], as `F.embedding`: ids (...) of integers, weight (V, D), the result (..., D) in the weight's dtype.

    In the backward pass the rows' gradients, those of one id summed in float32 or wider, are added to the dense
    gradient of the same matrix that an output head has offered in the same pass
    (`bowline.functional.shared_gradient`), and no second (V, D) is made. Where there is none, or it is not certain that
    autograd alone holds it, the gradient is that of `F.embedding`. What an optimizer, a hook or DDP sees is dense, and
    whole when they see it.

    Under torch.compile, torch.func's transforms, tracing and forward differentiation, and for tensor subclasses, it is
    `F.embedding`.

    Args:
        ids: rows of the matrix.
        weight: the matrix, used by a head or not.
        padding_idx: rows looked up at this id add nothing to its gradient; what the head gives it stays.

    Raises:
        UsageError: a weight that is no matrix, ids that are neither int64 nor int32, a padding_idx that is no row.
        IndexError: an id that is no row (on the CPU; on a GPU the kernel's own assertion).

    Example:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
        >>> rows = tied_embedding(torch.tensor([2, 0, 2]), weight)
        >>> rows.sum().backward()
        >>> rows[0].tolist(), weight.grad[:, 0].tolist()
        ([5.0, 6.0], [1.0, 0.0, 2.0])
    """
    if weight.ndim != 2:
        raise UsageError(f"weight {tuple(weight.shape)}: expected (V, D)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"ids of {ids.dtype}: expected torch.int64 or torch.int32", help="ids.long()")
    size = weight.shape[0]
    if padding_idx is not None and not -size <= padding_idx < size:
        raise UsageError(f"padding_idx={padding_idx} for weight {tuple(weight.shape)}: expected {-size} to {size - 1}")
    if _left_to_torch(ids, weight):
        return F.embedding(ids, weight, padding_idx)
    lookup: Any = _Lookup  # `apply` has no types
    rows: torch.Tensor = lookup.apply(ids, weight, -1 if padding_idx is None else padding_idx % size)
    return rows


class _Lookup(torch.autograd.Function):
    """ids (...), weight (V, D), padding_idx or -1, to (..., D)."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.padding_idx = weight.shape[0], padding_idx
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = grads
        if gradient is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        shared = take(ctx, 1) if type(gradient) is torch.Tensor else None
        if shared is not None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            add_rows(shared, ids.reshape(-1), rows, padding_idx=ctx.padding_idx)
            return None, None, None
        of_weight = summed_rows(gradient, ids, ctx.size, ctx.padding_idx)
        offer(ctx, 1, of_weight)  # to the next lookup of the same matrix
        return None, of_weight, None


def _left_to_torch(ids: torch.Tensor, weight: torch.Tensor) -> bool:
    """Where there is no backward pass of our own to come, or none in which a Function can take part."""
    jit: Any = torch.jit
    if torch.compiler.is_compiling() or jit.is_tracing():
        return True
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return True
    if (
        type(ids) is not torch.Tensor
        or type(weight) not in (torch.Tensor, nn.Parameter)
        or weight.device.type == "meta"
    ):
        return True
    return in_torch_func() or torch.autograd.forward_ad.unpack_dual(weight).tangent is not None
