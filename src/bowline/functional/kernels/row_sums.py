"""Rows added to a matrix where ids say: those of one id summed in float32 first, in an order that never changes."""

from __future__ import annotations

from typing import no_type_check

import torch

from bowline.functional.kernels.triton_support import jit, kernels_run_on, tl, triton

__all__ = ["add_rows", "summed_rows"]

NUMBERS = 2**22
"""Of a block of columns in which rows are summed without a kernel: 16 MB in float32."""
BLOCK, TOGETHER = 1024, 8
"""Columns of a program of the kernel, and rows of one id that it reads at once."""


def add_rows(
    table: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None = None,
    *,
    padding_idx: int = -1,
    read_ids: bool | None = None,
    kernels: bool = True,
) -> None:
    """table[v] += the sum of factor times row over the n with ids[n] = v, in place, rounded once.

    Table (V, D), ids (N,), rows (N, D), factors (N,) in float32 or wider, 1 where there are none. Rows at padding_idx
    are left out. Beside the table there are N rows or blocks of 16 MB, whatever is less, and with a kernel only the
    ids in order. Where the ids may not be read, as on a GPU by default, nothing waits for their values.

    Args:
        table: of any float dtype.
        ids: rows of the table; the kernel leaves others out, and without it they are an error.
        rows: what is added, of any float dtype.
        factors: of the rows.
        padding_idx: see above.
        read_ids: whether their values may be waited for; the kernel never does.
        kernels: whether a Triton kernel may do it, where there is one.
    """
    if kernels and table.stride(1) == 1 and kernels_run_on(table) and kernels_run_on(rows):
        _add_by_kernel(table, ids, rows, factors, padding_idx)
        return
    wide = torch.promote_types(table.dtype, torch.float32)
    if factors is not None:
        rows = rows.to(wide) * factors[:, None]
    ids = ids.long()
    if read_ids is None:
        read_ids = table.device.type == "cpu"
    if read_ids and padding_idx >= 0 and (ids == padding_idx).any():
        kept = (ids != padding_idx).nonzero()[:, 0]
        ids, rows = ids[kept], rows[kept]
    if read_ids and wide == table.dtype:
        table.index_add_(0, ids, rows.to(wide))
        return
    if read_ids:
        places, slots = ids.unique(return_inverse=True)
        count = len(places)
    else:  # of the positions of one id any may stand for all
        places, count, position = ids, len(ids), ids.new_empty(len(table))
        position[ids] = torch.arange(count, device=ids.device)
        slots = position[ids].masked_fill(ids == padding_idx, count)
    width = max(64, NUMBERS // max(1, len(ids)))
    for first in range(0, table.shape[1], width):
        part, some = table[:, first : first + width], rows[:, first : first + width]
        sums = summed_rows(some.to(wide), slots, count + 1, count)
        sums = sums[:count] if read_ids else sums[slots]
        part.index_copy_(0, places, sums.add_(part[places]).to(table.dtype))  # equal ids write the same


def summed_rows(rows: torch.Tensor, ids: torch.Tensor, size: int, padding_idx: int) -> torch.Tensor:
    """The gradient of `F.embedding`, (size, D), differentiable itself: rows (..., D) summed by ids (...)."""
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(rows, ids, size, padding_idx, False)
    return gradient


def _add_by_kernel(
    table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor | None, padding_idx: int
) -> None:
    count, width = rows.shape
    if not count or not width:
        return
    sorted_ids, order = ids.sort(stable=True)
    block = min(BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device_of(table):
        _add[(count, triton.cdiv(width, block))](
            table,
            table.stride(0),
            len(table),
            width,
            sorted_ids,
            order,
            rows if rows.stride(1) == 1 else rows.contiguous(),
            rows.stride(0) if rows.stride(1) == 1 else width,
            None if factors is None else factors.contiguous(),
            padding_idx,
            count,
            BLOCK=block,
            TOGETHER=TOGETHER,
            num_warps=max(1, min(8, block // 128)),
        )


@jit
@no_type_check
def _add(
    table,
    stride,
    size,
    width,
    ids,
    order,
    rows,
    row_stride,
    factors,
    padding_idx,
    count,
    BLOCK: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
):
    """One program an id, at the first of its places among the sorted ids, and a block of columns; none for no row."""
    first = tl.program_id(0)
    token = tl.load(ids + first).to(tl.int64)
    before = tl.load(ids + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if (before != token) & (token >= 0) & (token < size) & (token != padding_idx):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros((BLOCK,), tl.float32)
        at = first
        there = count - first
        while there > 0:
            places = at + tl.arange(0, TOGETHER)
            same = tl.load(ids + places, mask=places < count, other=-1) == token
            which = tl.load(order + places, mask=same, other=0)
            some = tl.load(
                rows + which[:, None] * row_stride + columns[None, :], mask=same[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            if factors is not None:
                some *= tl.load(factors + which, mask=same, other=0.0)[:, None]
            total += tl.sum(some, 0)
            at += TOGETHER
            there = tl.where(tl.sum(same.to(tl.int32)) == TOGETHER, count - at, 0)
        place = table + token * stride + columns
        held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (held + total).to(table.dtype.element_ty), mask=inside)
