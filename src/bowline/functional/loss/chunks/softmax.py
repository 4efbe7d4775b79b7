"""Between the products: a chunk of them becomes its losses and, in place, its gradient, as `rule` has it.

The label's own column is left out of the chunk (0) and returned in float32 beside it: in half precision it is most of
the gradient, and so it is never rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule
from bowline.functional.loss.chunks.triton_row_kernels import power_rows, softmax_rows
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources

__all__ = ["banned_tokens", "chunk_loss", "masked_chunk"]

CACHED = {"cpu": 2**18, "cuda": 2**24}
"""Logits that the plain operations take at once: on a CPU what stays in a cache, on a GPU what keeps it at work."""
Part = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def chunk_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    options: Options,
    allowed: Resources,
    *,
    by_factor: bool = False,
) -> Chunk:
    """Products x (n, V), which are overwritten: by their gradient where there is an `of_loss` (n,), else by anything.

    labels (n,) may be `ignore_index`; `of_lse` (n,) or `None`. `by_factor`: where it is faster, the gradient may be
    what they are overwritten by times the chunk's `factor`.
    """
    size = x.shape[1]
    rule = SoftmaxRule.of(options, size)
    banned = banned_tokens(options.mask_ids, size, x.device) if options.mask_ids else None
    if allowed.compiler and kernels_run_on(x):
        ignored = options.ignore_index
        if by_factor and of_loss is not None and x.dtype == torch.bfloat16 and not rule.share:
            return power_rows(x, labels, ignored, banned, of_loss, of_lse, rule)
        return softmax_rows(x, labels, ignored, banned, of_loss, of_lse, rule)
    wide = torch.promote_types(x.dtype, torch.float32)
    counted = labels != options.ignore_index
    ids = labels.masked_fill(~counted, 0)[:, None]
    label = x.gather(1, ids)[:, 0].to(wide)
    of_each = None if of_loss is None else of_loss.to(wide).masked_fill(~counted, 0.0)
    of_lse = None if of_lse is None else of_lse.to(wide)
    lse, added = _over_rows(x, banned, of_each, of_lse, rule)
    chunk = rule.finish(label, lse, added, counted, of_each, of_lse)
    if of_each is not None:
        if x.device.type == "cpu":
            x[torch.arange(len(x), device=x.device), ids[:, 0]] = 0.0  # scatter_ makes a second chunk there
        else:
            x.scatter_(1, ids, 0.0)  # a number to be copied to it would be waited for
    return chunk if banned is None else masked_chunk(chunk, banned[ids[:, 0]], counted)


def masked_chunk(chunk: Chunk, banned: torch.Tensor, counted: torch.Tensor) -> Chunk:
    """The chunk where the label, or token 0 which stands in for none, is `banned` (n,): infinite loss, no gradient."""
    of_label = None if chunk.of_label is None else chunk.of_label.masked_fill(banned, 0.0)
    return replace(chunk, losses=chunk.losses.masked_fill(banned & counted, torch.inf), of_label=of_label)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def banned_tokens(mask_ids: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Which tokens are masked, (V,) of bool. Made once: a GPU would have to wait for the copy in each chunk."""
    banned = torch.zeros(size, dtype=torch.bool, device="cpu")
    banned[list(mask_ids)] = True
    return banned.to(device)


def _over_rows(
    x: torch.Tensor,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lse and the sum of the logits of each row, (n,) and (n,)."""
    simple = rule.softcap is None and x.dtype == torch.promote_types(x.dtype, torch.float32)
    plain = _part_in_place(rule) if simple else _part(rule)
    step = max(1, CACHED.get(x.device.type, CACHED["cuda"]) // x.shape[1])
    if step >= len(x):
        return plain(x, banned, of_loss, of_lse)
    parts = [
        plain(rows, banned, *(None if one is None else one[first : first + len(rows)] for one in (of_loss, of_lse)))
        for first, rows in zip(range(0, len(x), step), x.split(step), strict=True)
    ]
    lse, added = (torch.cat(both) for both in zip(*parts, strict=True))
    return lse, added


def _part(rule: SoftmaxRule) -> Part:
    """All that reads or writes each logit, for a few rows."""

    def part(
        x: torch.Tensor, banned: torch.Tensor | None, of_loss: torch.Tensor | None, of_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = rule.logits(x.to(torch.promote_types(x.dtype, torch.float32)))
        finite = y
        if banned is not None:
            finite, y = y.masked_fill(banned, 0.0), y.masked_fill(banned, -torch.inf)
        lse, power, share = _powers(y)
        added = finite.sum(1) if rule.share else torch.zeros_like(lse)
        if of_loss is None:
            return lse, added
        gradient = power * (rule.of_p(lse, of_loss, of_lse) * share)[:, None]
        if rule.share:
            gradient = gradient - rule.share * of_loss[:, None]
        if rule.scale != 1.0 or rule.softcap is not None:
            gradient = gradient * rule.slope(finite)
        if banned is not None:
            gradient = gradient.masked_fill(banned, 0.0)
        x.copy_(gradient)
        return lse, added

    return part


def _part_in_place(rule: SoftmaxRule) -> Part:
    """`_part` of plain operations on wide numbers without a softcap: nothing as large as x is made beside it."""

    def part(
        x: torch.Tensor, banned: torch.Tensor | None, of_loss: torch.Tensor | None, of_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = rule.logits_(x)
        if rule.share:
            added = (y if banned is None else y.masked_fill(banned, 0.0)).sum(1)
        if banned is not None:
            y.masked_fill_(banned, -torch.inf)
        most = y.amax(1)
        most = most.masked_fill(most.isinf(), 0.0)
        power = y.sub_(most[:, None]).exp_()
        total = power.sum(1)
        lse = most + total.log()
        if of_loss is not None:
            power.mul_((rule.scale * rule.of_p(lse, of_loss, of_lse) / total)[:, None])
            if rule.share:
                power -= (rule.scale * rule.share * of_loss)[:, None]
                if banned is not None:
                    power.masked_fill_(banned, 0.0)
        return lse, added if rule.share else torch.zeros_like(lse)

    return part


def _powers(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lse (n,), and p as powers (n, V) and their share (n,): each power is made once and kept."""
    most = y.amax(1)
    most = most.masked_fill(most.isinf(), 0.0)
    power = (y - most[:, None]).exp_()
    total = power.sum(1)
    return most + total.log(), power, total.reciprocal()
