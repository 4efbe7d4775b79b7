"""Adds the label's column, which the products leave out, to the gradient of hidden: one Triton kernel."""

from __future__ import annotations

from typing import no_type_check

import torch

from bowline.functional.kernels.triton_support import jit, tl, triton

__all__ = ["add_label_rows"]

COLUMNS = 1024
"""Columns of hidden in one program."""


def add_label_rows(
    product: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    grad_label: torch.Tensor,
    out: torch.Tensor,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Out (n, D) = factor product + grad_label weight[ids]; the factor is 1 by default.

    product (n, D) is contiguous; it, grad_label (n,) and factor (n,) are in float32; ids (n,) are rows of weight
    (V, D).
    """
    rows, width = product.shape
    block = min(COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(product):
        _label_rows[(rows, triton.cdiv(width, block))](
            product,
            weight,
            weight.stride(0),
            weight.stride(1),
            len(weight),
            ids,
            grad_label,
            factor,
            out,
            out.stride(0),
            width,
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
        )
    return out


@jit
@no_type_check
def _label_rows(product, weight, stride, step, size, ids, grad_label, by, out, out_stride, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(ids + row).to(tl.int64)
    known = inside & (token >= 0) & (token < size)
    y = tl.load(product + row * width + columns, mask=inside, other=0.0)
    if by is not None:
        y *= tl.load(by + row)
    y += tl.load(grad_label + row) * tl.load(
        weight + token * stride + columns.to(tl.int64) * step, mask=known, other=0.0
    ).to(tl.float32)
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=inside)
