"""The first tokens' logits in the buffer of the matrix's own gradient, which is not needed before they are done with.

The gradient (V, D) has room for the logits of n <= D tokens, transposed: (V, n), its first n columns. A first pass over
blocks of the vocabulary makes their powers there; a second turns a block of powers into the gradient of its logits, and
the product of that with hidden takes the place of the block. So for as many as D tokens, whatever V is, the matrix is
read twice and its gradient written twice, and beyond the gradient there are only blocks that fit in a cache.
"""

from __future__ import annotations

import torch

from bowline.nn.loss.chunks import block_rows
from bowline.nn.loss.job import Job
from bowline.nn.loss.options import Options
from bowline.nn.loss.products import Products
from bowline.nn.loss.rule import Chunk, Rule
from bowline.nn.loss.softmax import banned_tokens, masked_chunk

__all__ = ["fits_in_place", "sweep_in_place"]

BLOCK = 2**21
"""Numbers in a block: three products are made of each, which like more rows than what is between them."""


def fits_in_place(options: Options) -> bool:
    """Not with a softcap and smoothing at once, whose gradient is no multiple of a power."""
    return not (options.softcap is not None and options.label_smoothing)


@torch.no_grad()
def sweep_in_place(
    job: Job,
    by: Products,
    *,
    of_weight: torch.Tensor,
    of_hidden: torch.Tensor | None,
    of_bias: torch.Tensor | None,
) -> Chunk:
    """`chunk_loss` of hidden (n, D), n <= D, and the products with its gradient.

    `of_weight` (V, D), whatever is in it, is made; `of_hidden` (n, D) and `of_bias` (V,), in float32 or wider, are
    added to.
    """
    hidden, weight, bias, labels, options = job.hidden, job.weight, job.bias, job.labels, job.options
    count, size, wide = len(hidden), len(weight), job.wide
    rule = Rule.of(options, size)
    counted = labels != options.ignore_index
    ids = job.ids()
    of_each = job.of_loss.to(wide).masked_fill(~counted, 0.0)
    step = block_rows(max(hidden.shape), BLOCK)
    parts = [slice(first, min(first + step, size)) for first in range(0, size, step)]
    banned = banned_tokens(options.mask_ids, size, weight.device)[:, None] if options.mask_ids else None
    kept, ready = of_weight[:, :count], by.ready(hidden)
    room = torch.empty(min(step, size), count, dtype=wide)

    most, total, added = (torch.full((count,), start, dtype=wide) for start in (-torch.inf, 0.0, 0.0))
    bases = []
    for part in parts:
        into = kept[part] if kept.dtype == wide else room[: part.stop - part.start]
        y = by.make_turned_logits(ready, weight[part], into)
        if bias is not None:
            y += bias[part, None]
        rule.logits_(y)
        without = None if banned is None else banned[part]
        if rule.share:
            added += (y if without is None else y.masked_fill(without, 0.0)).sum(0)
        slope = None if rule.softcap is None else 1 - (y / rule.softcap).square_()
        if without is not None:
            y.masked_fill_(without, -torch.inf)
        before, most = most, torch.maximum(most, y.amax(0))
        bases.append(most.masked_fill(most.isinf(), 0.0))
        y.sub_(bases[-1]).exp_()
        total = total * (before - bases[-1]).exp_() + y.sum(0)
        if slope is not None:
            y.mul_(slope)
        if kept.dtype != wide:
            kept[part] = y

    lse = bases[-1] + total.log()
    label = (hidden.to(wide) * weight[ids]).sum(1)
    chunk = rule.finish(label if bias is None else label + bias[ids], lse, added, counted, of_each, job.of_lse)
    if banned is not None:
        chunk = masked_chunk(chunk, banned[ids, 0], counted)
    of_p = rule.of_p(lse, of_each, job.of_lse) * rule.scale
    order = ids.argsort()
    bounds = torch.searchsorted(ids[order], torch.tensor([*(part.start for part in parts), size])).tolist()
    for at, part in enumerate(parts):
        x = torch.mul(kept[part], (bases[at] - lse).exp_() * of_p, out=room[: part.stop - part.start])
        if rule.share:
            x -= rule.share * rule.scale * of_each
            if banned is not None:
                x.masked_fill_(banned[part], 0.0)
        own = order[bounds[at] : bounds[at + 1]]
        x[ids[own] - part.start, own] = 0.0
        if of_bias is not None:
            of_bias[part] += x.sum(1)
        x = by.rounded(x, weight.dtype)
        if of_hidden is not None:
            by.add_of_hidden(of_hidden, x.t(), weight[part])
        by.add_block_of_weight(of_weight[part], x, ready, first=True)
    return chunk
