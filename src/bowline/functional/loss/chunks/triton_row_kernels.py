"""Triton kernels for the softmax between the products; plain operations read and write each logit a dozen times.

`softmax_rows` reads a row of logits twice and writes its gradient once. `power_rows` reads it once and writes powers.
The gradient is the powers times a factor that is known only at the end of the row, and the caller has to apply it.
`softmax` defines the result and chooses between the two.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.kernels.triton_support import jit, tl, triton
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule

__all__ = ["left_out", "logits", "power_rows", "softmax_rows", "times_slope", "with_block"]

BLOCK = 8192
"""Logits of a row that a program of `softmax_rows` holds at once, 16 of them in each of its threads."""
BLOCK_ONCE = 4096
"""The same for `power_rows`, which needs more registers."""
FAR = tl.constexpr(60.0) if tl else 60.0
"""Distance above the row's shift from which a logit's power would be too large."""


def softmax_rows(
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    """`chunk_loss` for products x (n, V) in a dtype of the kernels, and labels (n,), some of them `ignored`.

    If `grad_loss` (n,) is given, x is overwritten by its gradient, with 0 in the column of each row's label. `grad_lse`
    (n,) and `banned` (V,), the tokens whose logit is -inf, may be `None`; both gradients are in float32. A row whose
    incoming gradients are 0 gets a gradient of 0, whatever it holds. A label that is not a token gives a loss of NaN
    and meaningless gradients.

    The columns of x are adjacent. The memory between V and the row stride is scratch and is overwritten too, so that
    whole vectors are read and written for any V.
    """
    return _launched(_row, x, labels, ignored, banned, grad_loss, grad_lse, rule)


def power_rows(
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    """`softmax_rows` without smoothing, where the gradient is the new content of x times the chunk's `factor` (n,).

    Only for dtypes with the exponent range of float32.
    """
    return _launched(_powers, x, labels, ignored, banned, grad_loss, grad_lse, rule)


def _launched(
    kernel: Any,
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    rows, size, stride = *x.shape, x.stride(0)
    losses, lse, grad_label, factor = torch.empty(4, rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK if kernel is _row else BLOCK_ONCE, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):  # which need not be the current one
        kernel[(rows,)](
            x,
            stride,
            size,
            None if banned is None else F.pad(banned.view(torch.uint8), (0, stride - size)),
            labels.contiguous(),
            ignored,
            None if grad_loss is None else grad_loss.contiguous(),
            None if grad_lse is None else grad_lse.contiguous(),
            losses,
            lse,
            grad_label,
            factor,
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.z_loss or None,
            rule.share or None,
            rule.label_share,
            BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )
    return Chunk(
        losses=losses,
        lse=lse,
        grad_label=None if grad_loss is None else grad_label,
        factor=factor if kernel is _powers else None,
    )


@jit
@no_type_check
def _row(
    x,
    stride,
    size,
    banned,
    labels,
    ignored,
    grad_loss,
    grad_lse,
    losses,
    lse,
    grad_label,
    factor,
    scale,
    softcap,
    z_loss,
    share,
    label_share,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program per row; arguments that are `None` are compiled out, without a branch."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int64)
    counted = label != ignored
    label = tl.where(counted, label, 0)
    known = (label >= 0) & (label < size)
    target = _label_logit(x, label, known, scale, softcap)
    masked = _masked(banned, label, known)
    blocks = tl.cdiv(size, BLOCK)
    most = -float("inf")
    shift = 0.0
    total = 0.0
    plain = 0.0
    for block in range(blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        y = logits(x, columns, stride, scale, softcap)
        out = left_out(banned, columns, size, stride)
        if share is not None:
            plain += tl.sum(tl.where(out, 0.0, y))
        most, shift, total = with_block(most, total, tl.where(out, -float("inf"), y))
    found = shift + tl.log(total)
    tl.store(lse + row, found)
    tl.store(losses + row, tl.where(counted, _loss(found, target, plain, masked, z_loss, share, label_share), 0.0))
    if grad_loss is not None:
        grad_row = tl.where(counted, tl.load(grad_loss + row), 0.0)
        nothing = grad_row == 0.0
        if grad_lse is not None:
            nothing = nothing & (tl.load(grad_lse + row) == 0.0)
        if nothing:
            tl.store(grad_label + row, 0.0)
            for block in range(blocks):
                columns = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(x + columns, tl.zeros((BLOCK,), x.dtype.element_ty), mask=columns < stride)
        else:
            p_factor = _p_factor(grad_row, found, grad_lse, row, z_loss)
            tl.store(
                grad_label + row,
                _grad_label(target, found, p_factor, grad_row, masked, scale, softcap, share, label_share),
            )
            power_factor = p_factor / total
            for block in range(blocks):  # from the end of the row, which is still in the cache
                columns = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
                y = logits(x, columns, stride, scale, softcap)
                gradient = tl.exp(y - shift) * power_factor
                if share is not None:
                    gradient -= share * grad_row
                gradient = times_slope(gradient, y, scale, softcap)
                gradient = tl.where(left_out(banned, columns, size, stride) | (columns == label), 0.0, gradient)
                tl.store(x + columns, gradient.to(x.dtype.element_ty), mask=columns < stride)


@jit
@no_type_check
def _powers(
    x,
    stride,
    size,
    banned,
    labels,
    ignored,
    grad_loss,
    grad_lse,
    losses,
    lse,
    grad_label,
    factor,
    scale,
    softcap,
    z_loss,
    share,
    label_share,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program per row, read and written once; the shift is the highest logit of the first block.

    If a later logit is so much higher that its power would be too large, it becomes the shift from there on, and the
    powers written so far are rescaled.
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int64)
    counted = label != ignored
    label = tl.where(counted, label, 0)
    known = (label >= 0) & (label < size)
    target = _label_logit(x, label, known, scale, softcap)
    masked = _masked(banned, label, known)
    grad_row = tl.where(counted, tl.load(grad_loss + row), 0.0)
    nothing = grad_row == 0.0
    if grad_lse is not None:
        nothing = nothing & (tl.load(grad_lse + row) == 0.0)
    FEW: tl.constexpr = BLOCK if BLOCK < 1024 else 1024  # noqa: N806
    shift = -float("inf")
    total = 0.0
    for block in range(tl.cdiv(size, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        y = logits(x, columns, stride, scale, softcap)
        out = left_out(banned, columns, size, stride)
        most = tl.max(tl.where(out, -float("inf"), y))
        if (most - shift > FAR) & (most < float("inf")):
            if shift > -float("inf"):
                smaller = tl.exp(shift - most)
                total *= smaller
                tl.debug_barrier()
                for before in range(block * (BLOCK // FEW)):
                    at = x + before * FEW + tl.arange(0, FEW)
                    tl.store(at, (tl.load(at).to(tl.float32) * smaller).to(x.dtype.element_ty))
            shift = most
        y = tl.where(out, -float("inf"), logits(x, columns, stride, scale, softcap))  # computed again to save registers
        power = tl.exp(y - tl.where(shift == -float("inf"), 0.0, shift))
        total += tl.sum(power)
        if softcap is not None:
            power *= _cap_slope(y, softcap)
        power = tl.where(nothing, 0.0, tl.where(out | (columns == label), 0.0, power))
        tl.store(x + columns, power.to(x.dtype.element_ty), mask=columns < stride)
    found = tl.where(shift == -float("inf"), 0.0, shift) + tl.log(total)
    tl.store(lse + row, found)
    tl.store(losses + row, tl.where(counted, _loss(found, target, 0.0, masked, z_loss, None, label_share), 0.0))
    p_factor = _p_factor(grad_row, found, grad_lse, row, z_loss)
    by = p_factor / total
    if scale is not None:
        by *= scale
    gradient = _grad_label(target, found, p_factor, grad_row, masked, scale, softcap, None, label_share)
    tl.store(grad_label + row, tl.where(nothing, 0.0, gradient))
    tl.store(factor + row, tl.where(nothing, 0.0, by))


@jit
@no_type_check
def with_block(most, total, y):
    """Updates the highest logit, the shift and the sum of powers with a block's logits y."""
    higher = tl.maximum(most, tl.max(y))
    shift = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
    return higher, shift, total * tl.exp(most - shift) + tl.sum(tl.exp(y - shift))


@jit
@no_type_check
def logits(x, columns, stride, scale, softcap):
    """The logits of products x, in float32; 0 from `stride` on."""
    return _scaled_and_capped(tl.load(x + columns, mask=columns < stride, other=0.0).to(tl.float32), scale, softcap)


@jit
@no_type_check
def _label_logit(x, label, known, scale, softcap):
    return _scaled_and_capped(tl.load(x + label, mask=known, other=float("nan")).to(tl.float32), scale, softcap)


@jit
@no_type_check
def _scaled_and_capped(y, scale, softcap):
    if scale is not None:
        y *= scale
    if softcap is not None:
        y = _capped(y, softcap)
    return y


@jit
@no_type_check
def _masked(banned, label, known):
    """Whether the label is a banned token."""
    found = known & (label < 0)
    if banned is not None:
        found = tl.load(banned + label, mask=known, other=0) != 0
    return found


@jit
@no_type_check
def _loss(lse, target, plain, masked, z_loss, share, label_share):
    loss = lse - label_share * target
    if z_loss is not None:
        loss += z_loss * lse * lse
    if share is not None:
        loss -= share * plain
    return tl.where(masked, float("inf"), loss)


@jit
@no_type_check
def _p_factor(grad_row, lse, grad_lse, row, z_loss):
    found = grad_row
    if z_loss is not None:
        found += grad_row * 2.0 * z_loss * lse
    if grad_lse is not None:
        found += tl.load(grad_lse + row)
    return found


@jit
@no_type_check
def _grad_label(target, lse, p_factor, grad_row, masked, scale, softcap, share, label_share):
    found = tl.exp(target - lse) * p_factor - label_share * grad_row
    if share is not None:
        found -= share * grad_row
    return tl.where(masked, 0.0, times_slope(found, target, scale, softcap))


@jit
@no_type_check
def times_slope(gradient, y, scale, softcap):
    """The gradient of products from that of their logits y: times the scale and the slope of the softcap."""
    if scale is not None:
        gradient *= scale
    if softcap is not None:
        gradient *= _cap_slope(y, softcap)
    return gradient


@jit
@no_type_check
def _cap_slope(y, softcap):
    return 1.0 - (y / softcap) * (y / softcap)


@jit
@no_type_check
def _capped(y, softcap):
    """The softcap c tanh(y / c); by its series near 0, where a difference of numbers near 1 would lose digits."""
    u = y / softcap
    square = u * u
    near = u * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(u) < 0.1, near, 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0) * softcap


@jit
@no_type_check
def left_out(banned, columns, size, stride):
    """Columns beyond the vocabulary, and those of banned tokens."""
    out = columns >= size
    if banned is not None:
        out |= tl.load(banned + columns, mask=columns < stride, other=1) != 0
    return out
