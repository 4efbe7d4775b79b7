"""Turns a chunk of products into losses and, in place, into its gradient, by the formulas of `softmax_formulas`.

In the gradient the label's column is 0, and is returned separately in float32: it is most of the gradient, and so half
precision never rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule, finite_or_0
from bowline.functional.loss.chunks.triton_row_kernels import power_rows, softmax_rows
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources

__all__ = ["banned_tokens", "chunk_loss", "masked_chunk"]

CACHED = {"cpu": 2**18, "cuda": 2**24}
"""Logits per torch operation: on a CPU as many as stay in a cache, on a GPU enough to keep it busy."""
Part = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def chunk_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    options: Options,
    allowed: Resources,
    *,
    by_factor: bool = False,
) -> Chunk:
    """The losses of products x (n, V), which are overwritten: by their gradient if `grad_loss` (n,) is given.

    Without `grad_loss` their content is undefined afterwards. labels (n,) may be `ignore_index`; `grad_lse` is (n,) or
    `None`. `by_factor`: if it is faster, the gradient may be the new content times the chunk's `factor`.
    """
    size = x.shape[1]
    rule = SoftmaxRule.of(options, size)
    banned = banned_tokens(options.mask_ids, size, x.device) if options.mask_ids else None
    if allowed.compiler and kernels_run_on(x):
        ignored = options.ignore_index
        if by_factor and grad_loss is not None and x.dtype == torch.bfloat16 and not rule.share:
            return power_rows(x, labels, ignored, banned, grad_loss, grad_lse, rule)
        return softmax_rows(x, labels, ignored, banned, grad_loss, grad_lse, rule)
    wide = torch.promote_types(x.dtype, torch.float32)
    counted = labels != options.ignore_index
    ids = labels.masked_fill(~counted, 0)[:, None]
    label = x.gather(1, ids)[:, 0].to(wide)
    grad_each = None if grad_loss is None else grad_loss.to(wide).masked_fill(~counted, 0.0)
    grad_lse = None if grad_lse is None else grad_lse.to(wide)
    lse, added = _over_rows(x, banned, grad_each, grad_lse, rule)
    chunk = rule.finish(label, lse, added, counted, grad_each, grad_lse)
    if grad_each is not None:
        if x.device.type == "cpu":
            x[torch.arange(len(x), device=x.device), ids[:, 0]] = 0.0  # scatter_ allocates a second chunk on a CPU
        else:
            x.scatter_(1, ids, 0.0)  # indexing would copy a number to the GPU and wait
    return chunk if banned is None else masked_chunk(chunk, banned[ids[:, 0]], counted)


def masked_chunk(chunk: Chunk, banned: torch.Tensor, counted: torch.Tensor) -> Chunk:
    """The chunk with infinite loss and no gradient where the label (0 if there is none) is `banned` (n,)."""
    grad_label = None if chunk.grad_label is None else chunk.grad_label.masked_fill(banned, 0.0)
    return replace(chunk, losses=chunk.losses.masked_fill(banned & counted, torch.inf), grad_label=grad_label)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def banned_tokens(mask_ids: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Which tokens are masked, (V,) of bool; cached, because the copy to a GPU would be waited for in each chunk."""
    banned = torch.zeros(size, dtype=torch.bool, device="cpu")
    banned[list(mask_ids)] = True
    return banned.to(device)


def _over_rows(
    x: torch.Tensor,
    banned: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lse and the sum of the logits of each row, (n,) and (n,); x is overwritten."""
    simple = rule.softcap is None and x.dtype == torch.promote_types(x.dtype, torch.float32)
    plain = _part_in_place(rule) if simple else _part(rule)
    step = max(1, CACHED.get(x.device.type, CACHED["cuda"]) // x.shape[1])
    if step >= len(x):
        return plain(x, banned, grad_loss, grad_lse)
    parts = [
        plain(rows, banned, *(None if one is None else one[first : first + len(rows)] for one in (grad_loss, grad_lse)))
        for first, rows in zip(range(0, len(x), step), x.split(step), strict=True)
    ]
    lse, added = (torch.cat(both) for both in zip(*parts, strict=True))
    return lse, added


def _part(rule: SoftmaxRule) -> Part:
    """The work on each logit, as a function of a few rows."""

    def part(
        x: torch.Tensor, banned: torch.Tensor | None, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = rule.logits(x.to(torch.promote_types(x.dtype, torch.float32)))
        finite = y
        if banned is not None:
            finite, y = y.masked_fill(banned, 0.0), y.masked_fill(banned, -torch.inf)
        lse, power, share = _powers(y)
        added = finite.sum(1) if rule.share else torch.zeros_like(lse)
        if grad_loss is None:
            return lse, added
        gradient = power * (rule.p_factor(lse, grad_loss, grad_lse) * share)[:, None]
        if rule.share:
            gradient = gradient - rule.share * grad_loss[:, None]
        if rule.scale != 1.0 or rule.softcap is not None:
            gradient = gradient * rule.slope(finite)
        if banned is not None:
            gradient = gradient.masked_fill(banned, 0.0)
        x.copy_(gradient)
        return lse, added

    return part


def _part_in_place(rule: SoftmaxRule) -> Part:
    """`_part` in place, for float32 or wider without a softcap: allocates nothing as large as x."""

    def part(
        x: torch.Tensor, banned: torch.Tensor | None, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = rule.logits_(x)
        if rule.share:
            added = (y if banned is None else y.masked_fill(banned, 0.0)).sum(1)
        if banned is not None:
            y.masked_fill_(banned, -torch.inf)
        most = finite_or_0(y.amax(1))
        power = y.sub_(most[:, None]).exp_()
        total = power.sum(1)
        lse = most + total.log()
        if grad_loss is not None:
            power.mul_((rule.scale * rule.p_factor(lse, grad_loss, grad_lse) / total)[:, None])
            if rule.share:
                power -= (rule.scale * rule.share * grad_loss)[:, None]
                if banned is not None:
                    power.masked_fill_(banned, 0.0)
        return lse, added if rule.share else torch.zeros_like(lse)

    return part


def _powers(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lse (n,), and p as powers (n, V) times a share (n,); each power is computed once."""
    most = finite_or_0(y.amax(1))
    power = (y - most[:, None]).exp_()
    total = power.sum(1)
    return most + total.log(), power, total.reciprocal()
