"""The lookup of a tied matrix, whose gradient is added to the output head's in one buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.kernels.row_sums import summed_rows
from bowline.functional.row_shard import RowShard, is_dtensor
from bowline.functional.shared_gradient import leave_rows, meeting

__all__ = ["tied_embedding"]


def tied_embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[ids], as `F.embedding`: ids (...) of integers, weight (V, D), the result (..., D) in the weight's dtype.

    In the backward pass the gradients of the rows, those of one id summed in float32 or wider, are added to the dense
    gradient that `linear_cross_entropy` gives the same matrix in the same pass, and no second (V, D) is made
    (`bowline.functional.shared_gradient`). If something else holds the head's gradient, the rows are added to a copy.
    Without a head's gradient, the gradient is that of `F.embedding`. Optimizers, hooks on the matrix and DDP see one
    dense gradient, the sum of both ends.

    It is `F.embedding` under torch.compile, torch.func's transforms, tracing and forward differentiation, for tensor
    subclasses, and on another CUDA stream than the default one.

    If the weight is a DTensor whose rows are split over processes (`Shard(0)` on a one-dimensional mesh), each process
    looks up its own rows, and the rest by one all-reduce of the result. The ids are then the same on every process, and
    the result is whole on each: a plain tensor, or a replicated DTensor if the ids are a DTensor.

    Args:
        ids: rows of the matrix.
        weight: the matrix, used by a head or not.
        padding_idx: a row of the whole matrix; rows looked up at this id add nothing to its gradient, and what the head
            gives it stays.

    Raises:
        UsageError: a weight that is no matrix, ids that are neither int64 nor int32, a padding_idx that is no row; a
            DTensor that is split in another way, or ids that differ between its processes (on a GPU the result is NaN).
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
        raise UsageError(f"ids of {ids.dtype}: expected torch.int64 or torch.int32", help="pass ids.long()")
    size = weight.shape[0]
    if padding_idx is not None and not -size <= padding_idx < size:
        raise UsageError(f"padding_idx={padding_idx} for weight {tuple(weight.shape)}: expected {-size} to {size - 1}")
    if is_dtensor(weight) and not (is_dtensor(ids) and (torch.compiler.is_compiling() or not RowShard.fits(weight))):
        # imported here because it loads torch's compiler
        from bowline.functional.split_lookup import split_lookup

        found: torch.Tensor = split_lookup(tied_embedding, ids, weight, padding_idx)
        return found
    edge = meeting(weight) if type(ids) is torch.Tensor else None
    if edge is None:
        return F.embedding(ids, weight, padding_idx)
    lookup: Any = _Lookup  # `apply` has no types
    rows: torch.Tensor = lookup.apply(ids, weight.detach(), edge, -1 if padding_idx is None else padding_idx % size)
    return rows


class _Lookup(torch.autograd.Function):
    """ids (...), the weight's values (V, D), the edge of its meeting (V, D), padding_idx or -1, to (..., D)."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, edge: torch.Tensor, padding_idx: int
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.edge, ctx.padding_idx = edge, padding_idx
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = grads
        if gradient is None:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        if leave_rows(ctx.edge, ids, gradient, ctx.padding_idx):
            return None, None, None, None
        return None, None, summed_rows(gradient, ids, len(ctx.edge), ctx.padding_idx), None
