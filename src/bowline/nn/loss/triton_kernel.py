"""What is between the products, as one Triton kernel: a row of logits is read twice, and its gradient written once.

Without it, plain operations read and write each logit a dozen times, in float32. `softmax` says what is computed and
when this is chosen. A second kernel multiplies a gradient by a number that nobody on the CPU has seen. Without Triton
the file can be imported, and nothing in it called.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, no_type_check

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.nn.loss.rule import Rule

__all__ = ["DTYPES", "multiply_", "softmax_rows"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 8192
"""Logits of a row that a program holds at once, 16 of them in each of its threads."""

triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton else function


def softmax_rows(
    x: torch.Tensor,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    rule: Rule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lse and, where the rule has a share, the sum of the logits of each row, (n,) and (n,) in float32.

    Products x (n, V) of one of `DTYPES` are overwritten by their gradient where there is an `of_loss` (n,); `of_lse`
    (n,) and `banned` (V,), tokens whose logit is -inf, or `None`. Where nothing comes back for a row its gradient is 0,
    whatever it holds.

    The columns of x are neighbours. What lies between V and the stride of the rows is scratch and overwritten too, so
    that whole vectors are read and written whatever V is.
    """
    rows, size, stride = *x.shape, x.stride(0)
    lse = torch.empty(rows, dtype=torch.float32, device=x.device)
    added = torch.zeros_like(lse)
    block = min(BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):  # which need not be the current one
        _row[(rows,)](
            x,
            stride,
            size,
            None if banned is None else F.pad(banned.view(torch.uint8), (0, stride - size)),
            None if of_loss is None else of_loss.contiguous(),
            None if of_lse is None else of_lse.contiguous(),
            lse,
            added,
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.z_loss or None,
            rule.share or None,
            BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )
    return lse, added


def multiply_(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """X, contiguous and of one of `DTYPES`, times `factor`, a number on the same device: not touched where it is 1."""
    with torch.cuda.device_of(x):
        _multiply[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=8)
    return x


@_jit
@no_type_check
def _multiply(x, factor, size, BLOCK: tl.constexpr):  # noqa: N803
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(x + at, mask=at < size).to(tl.float32) * by
        tl.store(x + at, y.to(x.dtype.element_ty), mask=at < size)


@_jit
@no_type_check
def _row(
    x,
    stride,
    size,
    banned,
    of_loss,
    of_lse,
    lse,
    added,
    scale,
    softcap,
    z_loss,
    share,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row. Whatever is `None` is left out when the kernel is compiled, and is no branch."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * stride
    blocks = tl.cdiv(size, BLOCK)
    most = -float("inf")
    shift = 0.0
    total = 0.0
    plain = 0.0
    for block in range(blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        y = _logits(x, columns, stride, scale, softcap)
        out = _left_out(banned, columns, size, stride)
        if share is not None:
            plain += tl.sum(tl.where(out, 0.0, y))
        y = tl.where(out, -float("inf"), y)
        before = most
        most = tl.maximum(most, tl.max(y))
        shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(y - shift))
    found = shift + tl.log(total)
    tl.store(lse + row, found)
    if share is not None:
        tl.store(added + row, plain)
    if of_loss is not None:
        of_row = tl.load(of_loss + row)
        of_p = of_row
        if z_loss is not None:
            of_p += of_row * 2.0 * z_loss * found
        if of_lse is not None:
            of_p += tl.load(of_lse + row)
        of_power = of_p / total
        if (of_p == 0.0) & (of_row == 0.0):
            for block in range(blocks):
                columns = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(x + columns, tl.zeros((BLOCK,), x.dtype.element_ty), mask=columns < stride)
        else:
            for block in range(blocks):  # from the end, which the cache still holds
                columns = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
                y = _logits(x, columns, stride, scale, softcap)
                gradient = tl.exp(y - shift) * of_power
                if share is not None:
                    gradient -= share * of_row
                if scale is not None:
                    gradient *= scale
                if softcap is not None:
                    gradient *= 1.0 - (y / softcap) * (y / softcap)
                gradient = tl.where(_left_out(banned, columns, size, stride), 0.0, gradient)
                tl.store(x + columns, gradient.to(x.dtype.element_ty), mask=columns < stride)


@_jit
@no_type_check
def _logits(x, columns, stride, scale, softcap):
    y = tl.load(x + columns, mask=columns < stride, other=0.0).to(tl.float32)
    if scale is not None:
        y *= scale
    if softcap is not None:
        y = (2.0 / (1.0 + tl.exp(-2.0 * (y / softcap))) - 1.0) * softcap  # tanh
    return y


@_jit
@no_type_check
def _left_out(banned, columns, size, stride):
    """Columns that are no token, or that no token may be."""
    out = columns >= size
    if banned is not None:
        out |= tl.load(banned + columns, mask=columns < stride, other=1) != 0
    return out
