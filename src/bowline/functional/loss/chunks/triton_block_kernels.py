"""Triton kernels for a block of the vocabulary: its part of the lse, and later the gradient of its logits."""

from __future__ import annotations

from typing import no_type_check

import torch

from bowline.functional.kernels.triton_support import jit, tl, triton
from bowline.functional.loss.chunks.softmax_formulas import SoftmaxRule
from bowline.functional.loss.chunks.triton_row_kernels import left_out, logits, times_slope, with_block

__all__ = ["add_to_lse", "gradient_rows"]

BLOCK, BLOCK_ONCE = 4096, 2048
"""Logits of a row that a program holds at once: in `add_to_lse`, which loops over a row, and in `gradient_rows`."""


def add_to_lse(
    x: torch.Tensor,
    first: int,
    labels: torch.Tensor,
    label: torch.Tensor,
    lse: torch.Tensor,
    added: torch.Tensor,
    banned: torch.Tensor | None,
    rule: SoftmaxRule,
) -> None:
    """Adds products x (n, b), of the tokens from `first` on, to their rows' lse and sum of logits.

    `lse` and `added` are (n,) in float32, labels (n,), and banned (b,) or `None`. If the block has the label, its
    product is written to `label` (n,), in float32. The columns of x are adjacent.
    """
    with torch.cuda.device_of(x):
        _lse[(len(x),)](
            x,
            x.stride(0),
            x.shape[1],
            first,
            labels,
            label,
            lse,
            added,
            None if banned is None else banned.view(torch.uint8),
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.share or None,
            BLOCK=BLOCK,
            num_warps=8,
        )


def gradient_rows(
    x: torch.Tensor,
    first: int,
    ids: torch.Tensor,
    lse: torch.Tensor,
    grad_loss: torch.Tensor,
    p_factor: torch.Tensor,
    grad_label: torch.Tensor,
    banned: torch.Tensor | None,
    rule: SoftmaxRule,
    out: torch.Tensor,
) -> None:
    """Writes the gradient of products x (n, b), of the tokens from `first` on, to `out` (n, b), which may be x.

    The label's column is 0 there and is written to `grad_label` (n,). `lse`, `grad_loss`, `p_factor` (the factor of p
    in the gradient) and `grad_label` are (n,) in float32, ids (n,) are the labels, and banned is (b,) or `None`. The
    columns of x and of `out` are adjacent. If an id is not in the block, its `grad_label` stays as it is.
    """
    rows, size = x.shape
    with torch.cuda.device_of(x):
        _gradient[(rows, triton.cdiv(size, BLOCK_ONCE))](
            x,
            x.stride(0),
            out,
            out.stride(0),
            size,
            first,
            ids,
            lse,
            grad_loss,
            p_factor,
            grad_label,
            None if banned is None else banned.view(torch.uint8),
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.share or None,
            rule.label_share,
            BLOCK=BLOCK_ONCE,
            num_warps=4,
        )


@jit
@no_type_check
def _lse(
    x,
    stride,
    size,
    first,
    labels,
    label,
    lse,
    added,
    banned,
    scale,
    softcap,
    share,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program per row; every number is read once."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    column = tl.load(labels + row).to(tl.int64) - first
    here = (column >= 0) & (column < size)
    tl.store(label + row, tl.load(x + column, mask=here, other=0.0).to(tl.float32), mask=here)
    most = tl.load(lse + row)
    total = tl.where(most == -float("inf"), 0.0, 1.0)
    shift = 0.0
    plain = 0.0
    for block in range(tl.cdiv(size, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        y = logits(x, columns, size, scale, softcap)
        out = left_out(banned, columns, size, size)
        if share is not None:
            plain += tl.sum(tl.where(out, 0.0, y))
        most, shift, total = with_block(most, total, tl.where(out, -float("inf"), y))
    tl.store(lse + row, shift + tl.log(total))
    if share is not None:
        tl.store(added + row, tl.load(added + row) + plain)


@jit
@no_type_check
def _gradient(
    x,
    stride,
    out,
    out_stride,
    size,
    first,
    ids,
    lse,
    grad_loss,
    p_factor,
    grad_label,
    banned,
    scale,
    softcap,
    share,
    label_share,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program per block of a row; every number is read and written once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    label = tl.load(ids + row).to(tl.int64) - first
    grad_row, by = tl.load(grad_loss + row), tl.load(p_factor + row)
    y = logits(x + row * stride, columns, size, scale, softcap)
    gradient = tl.exp(y - tl.load(lse + row)) * by
    if share is not None:
        gradient -= share * grad_row
    here = columns == label
    gradient = tl.where(here, gradient - label_share * grad_row, gradient)
    gradient = times_slope(gradient, y, scale, softcap)
    if banned is not None:
        gradient = tl.where(tl.load(banned + columns, mask=inside, other=1) != 0, 0.0, gradient)
    gradient = tl.where((grad_row == 0.0) & (by == 0.0), 0.0, gradient)
    tl.store(grad_label + row + tl.zeros((BLOCK,), tl.int64), gradient, mask=here & inside)
    tl.store(out + row * out_stride + columns, tl.where(here, 0.0, gradient).to(out.dtype.element_ty), mask=inside)
