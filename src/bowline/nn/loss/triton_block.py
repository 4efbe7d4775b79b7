"""The gradient of a block of the vocabulary's logits, whose lse is known, as one Triton kernel."""

from __future__ import annotations

from typing import no_type_check

import torch

from bowline.nn.kernels import jit, tl, triton
from bowline.nn.loss.rule import Rule
from bowline.nn.loss.triton_kernel import capped

__all__ = ["gradient_rows"]


def gradient_rows(
    x: torch.Tensor,
    first: int,
    ids: torch.Tensor,
    lse: torch.Tensor,
    of_loss: torch.Tensor,
    of_p: torch.Tensor,
    own: torch.Tensor,
    banned: torch.Tensor | None,
    rule: Rule,
) -> None:
    """Products x (n, b) with the tokens from `first` on become their gradient; the label's own column goes to own (n,).

    `lse`, `of_loss`, `of_p` (what p is multiplied by) and `own` are (n,) in float32, ids (n,) are the labels, and
    banned (b,) or `None`. The columns of x are neighbours. An id that is not in the block leaves its `own` alone.
    """
    rows, size = x.shape
    block = min(2048, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):
        _gradient[(rows, triton.cdiv(size, block))](
            x,
            x.stride(0),
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
            BLOCK=block,
            num_warps=4,
        )


@jit
@no_type_check
def _gradient(
    x,
    stride,
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
    at = x + row * stride + columns
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        y *= scale
    if softcap is not None:
        y = capped(y, softcap)
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
    tl.store(at, tl.where(here, 0.0, gradient).to(x.dtype.element_ty), mask=inside)
