"""What is between the products, as Triton kernels; plain operations read and write each logit a dozen times.

`softmax_rows` reads a row of logits twice and writes its gradient once. `power_rows` reads it once and writes powers,
of which the gradient is a multiple that is known only at the end of the row: whoever multiplies them has to put it in.
`softmax` says what is computed and when which is chosen.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.kernels.triton_support import jit, tl, triton
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule

__all__ = ["left_out", "logits", "power_rows", "softmax_rows", "with_block"]

BLOCK = 8192
"""Logits of a row that a program of `softmax_rows` holds at once, 16 of them in each of its threads."""
BLOCK_ONCE = 4096
"""The same of `power_rows`, which needs more registers."""
FAR = tl.constexpr(60.0) if tl else 60.0
"""Above the number that is taken off its logits, a logit of which the power would become too large."""


def softmax_rows(
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    """`chunk_loss` of products x (n, V) of a dtype of the kernels, labels (n,) of which some may be `ignored`.

    x is overwritten by its gradient where there is an `of_loss` (n,), 0 in each row's own column; `of_lse` (n,) and
    `banned` (V,), tokens whose logit is -inf, or `None`; both gradients in float32. Where nothing comes back for a row
    its gradient is 0, whatever it holds. A label that is no token has a loss of NaN, and gradients that mean nothing.

    The columns of x are neighbours. What lies between V and the stride of the rows is scratch and overwritten too, so
    that whole vectors are read and written whatever V is.
    """
    return _launched(_row, x, labels, ignored, banned, of_loss, of_lse, rule)


def power_rows(
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor,
    of_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    """`softmax_rows` of a rule without a share, but the gradient is what x becomes times `factor` (n,) of the chunk.

    Only for dtypes with the exponents of float32.
    """
    return _launched(_powers, x, labels, ignored, banned, of_loss, of_lse, rule)


def _launched(
    kernel: Any,
    x: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> Chunk:
    rows, size, stride = *x.shape, x.stride(0)
    losses, lse, own, factor = torch.empty(4, rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK if kernel is _row else BLOCK_ONCE, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):  # which need not be the current one
        kernel[(rows,)](
            x,
            stride,
            size,
            None if banned is None else F.pad(banned.view(torch.uint8), (0, stride - size)),
            labels.contiguous(),
            ignored,
            None if of_loss is None else of_loss.contiguous(),
            None if of_lse is None else of_lse.contiguous(),
            losses,
            lse,
            own,
            factor,
            None if rule.scale == 1.0 else rule.scale,
            rule.softcap,
            rule.z_loss or None,
            rule.share or None,
            rule.kept,
            BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )
    return Chunk(
        losses=losses,
        lse=lse,
        of_label=None if of_loss is None else own,
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
    of_loss,
    of_lse,
    losses,
    lse,
    own,
    factor,
    scale,
    softcap,
    z_loss,
    share,
    kept,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row. Whatever is `None` is left out when the kernel is compiled, and is no branch."""
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
    tl.store(losses + row, tl.where(counted, _loss(found, target, plain, masked, z_loss, share, kept), 0.0))
    if of_loss is not None:
        of_row = tl.where(counted, tl.load(of_loss + row), 0.0)
        nothing = of_row == 0.0
        if of_lse is not None:
            nothing = nothing & (tl.load(of_lse + row) == 0.0)
        if nothing:
            tl.store(own + row, 0.0)
            for block in range(blocks):
                columns = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(x + columns, tl.zeros((BLOCK,), x.dtype.element_ty), mask=columns < stride)
        else:
            of_p = _of_p(of_row, found, of_lse, row, z_loss)
            tl.store(own + row, _of_label(target, found, of_p, of_row, masked, scale, softcap, share, kept))
            of_power = of_p / total
            for block in range(blocks):  # from the end, which the cache still holds
                columns = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
                y = logits(x, columns, stride, scale, softcap)
                gradient = tl.exp(y - shift) * of_power
                if share is not None:
                    gradient -= share * of_row
                if scale is not None:
                    gradient *= scale
                if softcap is not None:
                    gradient *= 1.0 - (y / softcap) * (y / softcap)
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
    of_loss,
    of_lse,
    losses,
    lse,
    own,
    factor,
    scale,
    softcap,
    z_loss,
    share,
    kept,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row, read and written once; what is taken off its logits is the most of the first block.

    Where a later logit is so far above that its power would be too large, that is taken off from there on, and what is
    written already is multiplied.
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int64)
    counted = label != ignored
    label = tl.where(counted, label, 0)
    known = (label >= 0) & (label < size)
    target = _label_logit(x, label, known, scale, softcap)
    masked = _masked(banned, label, known)
    of_row = tl.where(counted, tl.load(of_loss + row), 0.0)
    nothing = of_row == 0.0
    if of_lse is not None:
        nothing = nothing & (tl.load(of_lse + row) == 0.0)
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
        y = tl.where(out, -float("inf"), logits(x, columns, stride, scale, softcap))  # again: it need not be kept
        power = tl.exp(y - tl.where(shift == -float("inf"), 0.0, shift))
        total += tl.sum(power)
        if softcap is not None:
            power *= 1.0 - (y / softcap) * (y / softcap)
        power = tl.where(nothing, 0.0, tl.where(out | (columns == label), 0.0, power))
        tl.store(x + columns, power.to(x.dtype.element_ty), mask=columns < stride)
    found = tl.where(shift == -float("inf"), 0.0, shift) + tl.log(total)
    tl.store(lse + row, found)
    tl.store(losses + row, tl.where(counted, _loss(found, target, 0.0, masked, z_loss, None, kept), 0.0))
    of_p = _of_p(of_row, found, of_lse, row, z_loss)
    by = of_p / total
    if scale is not None:
        by *= scale
    of_label = _of_label(target, found, of_p, of_row, masked, scale, softcap, None, kept)
    tl.store(own + row, tl.where(nothing, 0.0, of_label))
    tl.store(factor + row, tl.where(nothing, 0.0, by))


@jit
@no_type_check
def with_block(most, total, y):
    """The highest logit so far, what is taken off all of them, and the sum of their powers, with a block's y."""
    higher = tl.maximum(most, tl.max(y))
    shift = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
    return higher, shift, total * tl.exp(most - shift) + tl.sum(tl.exp(y - shift))


@jit
@no_type_check
def logits(x, columns, stride, scale, softcap):
    """Of products x, in float32; 0 from `stride` on."""
    y = tl.load(x + columns, mask=columns < stride, other=0.0).to(tl.float32)
    if scale is not None:
        y *= scale
    if softcap is not None:
        y = _capped(y, softcap)
    return y


@jit
@no_type_check
def _label_logit(x, label, known, scale, softcap):
    y = tl.load(x + label, mask=known, other=float("nan")).to(tl.float32)
    if scale is not None:
        y *= scale
    if softcap is not None:
        y = _capped(y, softcap)
    return y


@jit
@no_type_check
def _masked(banned, label, known):
    """Whether the label is a token that no token may be."""
    found = known & (label < 0)
    if banned is not None:
        found = tl.load(banned + label, mask=known, other=0) != 0
    return found


@jit
@no_type_check
def _loss(lse, target, plain, masked, z_loss, share, kept):
    loss = lse - kept * target
    if z_loss is not None:
        loss += z_loss * lse * lse
    if share is not None:
        loss -= share * plain
    return tl.where(masked, float("inf"), loss)


@jit
@no_type_check
def _of_p(of_row, lse, of_lse, row, z_loss):
    found = of_row
    if z_loss is not None:
        found += of_row * 2.0 * z_loss * lse
    if of_lse is not None:
        found += tl.load(of_lse + row)
    return found


@jit
@no_type_check
def _of_label(target, lse, of_p, of_row, masked, scale, softcap, share, kept):
    found = tl.exp(target - lse) * of_p - kept * of_row
    if share is not None:
        found -= share * of_row
    if scale is not None:
        found *= scale
    if softcap is not None:
        found *= 1.0 - (target / softcap) * (target / softcap)
    return tl.where(masked, 0.0, found)


@jit
@no_type_check
def _capped(y, softcap):
    """The softcap c tanh(y / c); near 0, where a difference of numbers near 1 would lose the digits, by its series."""
    u = y / softcap
    square = u * u
    near = u * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(u) < 0.1, near, 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0) * softcap


@jit
@no_type_check
def left_out(banned, columns, size, stride):
    """Columns that are no token, or that no token may be."""
    out = columns >= size
    if banned is not None:
        out |= tl.load(banned + columns, mask=columns < stride, other=1) != 0
    return out
