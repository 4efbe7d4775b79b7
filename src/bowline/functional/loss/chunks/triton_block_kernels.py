"""Of a block of the vocabulary's logits their part of the lse, and, that known, their gradient, as Triton kernels."""

from __future__ import annotations

from typing import no_type_check

import torch

from bowline.functional.kernels.triton_support import jit, tl, triton
from bowline.functional.loss.chunks.softmax_formulas import SoftmaxRule
from bowline.functional.loss.chunks.triton_row_kernels import left_out, logits, with_block

__all__ = ["add_to_lse", "gradient_rows"]

BLOCK, BLOCK_ONCE = 4096, 2048
"""Logits of a row that a program holds at once: of `add_to_lse`, which goes on to the next, and of `gradient_rows`."""


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
    """Products x (n, b) with the tokens from `first` on go into the lse and the sum of the logits of their rows.

    `lse` and `added` are (n,) in float32, labels (n,), and banned (b,) or `None`. The product with the label goes to
    `label` (n,) in float32, if the block has it. The columns of x are neighbours.
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
    of_loss: torch.Tensor,
    of_p: torch.Tensor,
    own: torch.Tensor,
    banned: torch.Tensor | None,
    rule: SoftmaxRule,
    out: torch.Tensor,
) -> None:
    """The gradient of products x (n, b) with the tokens from `first` on, into `out` (n, b), which may be x.

    The label's own column is 0 there and goes to `own` (n,). `lse`, `of_loss`, `of_p` (what p is multiplied by) and
    `own` are (n,) in float32, ids (n,) are the labels, and banned (b,) or `None`. The columns of x and of `out` are
    neighbours. An id that is not in the block leaves its `own` alone.
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
            of_loss,
            of_p,
            own,
            None if banned is None else banned.view(torch.uint8),
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.share or None,
            rule.kept,
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
    """One program a row, of which every number is read once."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    own = tl.load(labels + row).to(tl.int64) - first
    here = (own >= 0) & (own < size)
    tl.store(label + row, tl.load(x + own, mask=here, other=0.0).to(tl.float32), mask=here)
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
    of_loss,
    of_p,
    own,
    banned,
    scale,
    softcap,
    share,
    kept,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a block of a row, of which every number is read and written once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    label = tl.load(ids + row).to(tl.int64) - first
    of_row, by = tl.load(of_loss + row), tl.load(of_p + row)
    y = logits(x + row * stride, columns, size, scale, softcap)
    gradient = tl.exp(y - tl.load(lse + row)) * by
    if share is not None:
        gradient -= share * of_row
    here = columns == label
    gradient = tl.where(here, gradient - kept * of_row, gradient)
    if scale is not None:
        gradient *= scale
    if softcap is not None:
        gradient *= 1.0 - (y / softcap) * (y / softcap)
    if banned is not None:
        gradient = tl.where(tl.load(banned + columns, mask=inside, other=1) != 0, 0.0, gradient)
    gradient = tl.where((of_row == 0.0) & (by == 0.0), 0.0, gradient)
    tl.store(own + row + tl.zeros((BLOCK,), tl.int64), gradient, mask=here & inside)
    tl.store(out + row * out_stride + columns, tl.where(here, 0.0, gradient).to(out.dtype.element_ty), mask=inside)
