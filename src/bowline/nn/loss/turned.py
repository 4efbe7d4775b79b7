"""A chunk of tokens whose logits are kept turned, (V, n): made, and used up, block by block of the vocabulary.

A first pass makes the powers e^(y - base) of each block and adds them up, a second multiplies each block of powers with
the matrix and with hidden. The base is a number for each token, so the gradient of a logit is its power times a factor
of the token, and hidden (n, D) is multiplied by that factor, not the powers.

Turned, because a product of few tokens is faster so (a tenth and more with MKL: the large matrix is read as it lies);
and because a row of the matrix's gradient, D numbers, has room for the logits of n <= D tokens. So the first tokens'
are kept in the buffer of that gradient, which is not needed before they are done with: for as many as D tokens,
whatever V is, there are beyond the gradient only blocks that fit in a cache.
"""

from __future__ import annotations

import torch

from bowline.nn.loss.job import Job
from bowline.nn.loss.options import Options
from bowline.nn.loss.products import Products
from bowline.nn.loss.rule import Chunk, Rule
from bowline.nn.loss.softmax import banned_tokens, masked_chunk

__all__ = ["fits_turned", "sweep_turned"]

BLOCK = 2**22
"""Numbers in a block: three products are made of each, which like more rows than what is between them."""
LEAST_ROWS = 256
CACHED = 2**19
"""Numbers in what is made powers at once."""
MOST = {torch.float16: 2.0**14}
"""Sums of a block's powers from which on the base is too low, by the dtype in which powers are kept."""
MOST_OF_OTHERS = 2.0**60


def fits_turned(options: Options) -> bool:
    """Not with a softcap and smoothing at once, whose gradient is no multiple of a power."""
    return not (options.softcap is not None and options.label_smoothing)


@torch.no_grad()
def sweep_turned(
    job: Job,
    by: Products,
    *,
    of_hidden: torch.Tensor | None,
    of_weight: torch.Tensor | None,
    of_bias: torch.Tensor | None,
    first: bool,
    room: torch.Tensor | None,
) -> Chunk:
    """The losses of hidden (n, D), and the products with the gradient of their logits.

    `room`: (V, n) for the powers, or `None` for the buffer of `of_weight`, with n <= D. Where it is the `first` chunk,
    `of_weight` (V, D), whatever is in it, is made, else added to; `of_hidden` (n, D), of zeros, and `of_bias` (V,), in
    float32 or wider, are added to.
    """
    sweep = _Turned(job, by, of_weight if room is None else room)
    chunk = sweep.losses()
    if of_hidden is not None or of_weight is not None or of_bias is not None:
        sweep.gradients(of_hidden, of_weight, of_bias, first=first, in_place=room is None)
    return chunk


class _Turned:
    """The two passes over the vocabulary, and what the second knows from the first."""

    def __init__(self, job: Job, by: Products, kept: torch.Tensor | None) -> None:
        size, count = len(job.weight), len(job.hidden)
        self.job, self.by = job, by
        self.rule = Rule.of(job.options, size)
        self.hidden = by.ready(job.hidden)
        self.kept = None if kept is None else kept[:, :count]
        step = self._rows_of_a_block()
        self.parts = [slice(first, min(first + step, size)) for first in range(0, size, step)]
        banned = banned_tokens(job.options.mask_ids, size, job.weight.device) if job.options.mask_ids else None
        self.banned = None if banned is None else banned[:, None]
        self.block = torch.empty(min(step, size), count, dtype=job.wide)
        self.ids = job.ids()
        counted = job.labels != job.options.ignore_index
        self.counted, self.of_each = counted, job.of_loss.to(job.wide).masked_fill(~counted, 0.0)

    def _rows_of_a_block(self) -> int:
        """Of `torch.mm` a block is its logits alone, else there are widened ones beside it, and rows of the matrix."""
        count, width = self.job.hidden.shape
        alone = self.by.plain and self.job.weight.dtype == self.job.wide and not self.rule.share
        return max(LEAST_ROWS, BLOCK // max(1, count) if alone else BLOCK // 2 // max(1, count, width))

    # --- losses -------------------------------------------------------------------------------------------------------

    def losses(self) -> Chunk:
        """The first pass; in `kept`, if there is any, the powers times the slope of the softcap."""
        job, count, limit = self.job, len(self.ids), MOST.get(self.job.weight.dtype, MOST_OF_OTHERS)
        total, added = torch.zeros(2, count, dtype=job.wide)
        most = torch.full((count,), -torch.inf, dtype=job.wide)  # of the first block with a token that is not masked
        at = 0
        while at < len(self.parts):
            y, more = self._logits(self.parts[at])
            if (most == -torch.inf).any():
                most = torch.where(most == -torch.inf, y.amax(0), most)
            sums = self._powers(y, self.parts[at], _finite(most))
            if (sums > limit).any():
                y, more = self._logits(self.parts[at])
                higher = torch.maximum(most, y.amax(0))
                if (higher > most).any():
                    most, at = higher, 0
                    total, added = torch.zeros(2, count, dtype=job.wide)
                    continue
                sums = self._powers(y, self.parts[at], _finite(most))  # a logit is infinite: the other tokens' are not
            total += sums
            added += more
            at += 1
        base = _finite(most)
        lse = base + total.log()
        label = (job.hidden.to(job.wide) * job.weight[self.ids]).sum(1)
        label = label if job.bias is None else label + job.bias[self.ids]
        chunk = self.rule.finish(label, lse, added, self.counted, self.of_each, job.of_lse)
        self.factor = (base - lse).exp_() * self.rule.of_p(lse, self.of_each, job.of_lse) * self.rule.scale
        return chunk if self.banned is None else masked_chunk(chunk, self.banned[self.ids, 0], self.counted)

    def _logits(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Y (b, n) of a block, masked tokens at -inf, and for a loss with smoothing the sum of the others, (n,)."""
        bias, rule = self.job.bias, self.rule
        wide = self.kept is not None and self.kept.dtype == self.block.dtype
        into = self.kept[part] if wide and self.kept is not None else self.block[: part.stop - part.start]
        y = self.by.make_turned_logits(self.hidden, self.job.weight[part], into)
        if bias is not None:
            y += bias[part, None]
        rule.logits_(y)
        without = None if self.banned is None else self.banned[part]
        added = (y if without is None else y.masked_fill(without, 0.0)).sum(0) if rule.share else 0.0
        return y if without is None else y.masked_fill_(without, -torch.inf), added

    def _powers(self, y: torch.Tensor, part: slice, base: torch.Tensor) -> torch.Tensor:
        """The sums (n,) of e^(y - base); y becomes that times the slope of the softcap, and is kept."""
        softcap = self.rule.softcap
        sums = torch.zeros_like(base)
        for some in y.split(max(1, CACHED // max(1, y.shape[1]))):
            slope = None if softcap is None else 1 - (some / softcap).square_()
            sums += some.sub_(base).exp_().sum(0)
            if slope is not None:  # of a masked token it is -inf
                some.mul_(slope.clamp_(min=0.0))
        if self.kept is not None and self.kept.dtype != y.dtype:
            self.kept[part] = y
        return sums

    # --- gradients ----------------------------------------------------------------------------------------------------

    def gradients(
        self,
        of_hidden: torch.Tensor | None,
        of_weight: torch.Tensor | None,
        of_bias: torch.Tensor | None,
        *,
        first: bool,
        in_place: bool,
    ) -> None:
        """The second pass, without the column of each token's own label."""
        assert self.kept is not None
        by, weight, factor = self.by, self.job.weight, self.factor
        # A sum with what smoothing takes off, and what has to be rounded, are multiplied themselves.
        itself = bool(self.rule.share) or not (by.widens or weight.dtype == self.job.wide)
        hidden = self.hidden if itself else by.ready(self.job.hidden.to(self.job.wide) * factor[:, None])
        order = self.ids.argsort()
        starts = torch.tensor([*(part.start for part in self.parts), len(weight)])
        bounds = torch.searchsorted(self.ids[order], starts).tolist()
        for part, begin, end in zip(self.parts, bounds, bounds[1:], strict=False):
            x = self.kept[part]
            if itself:
                x = self._multiplied(x, part)
            elif in_place:
                x = self.block[: len(x)].copy_(x)
            own = order[begin:end]
            x[self.ids[own] - part.start, own] = 0.0
            if of_bias is not None:
                of_bias[part] += x.sum(1) if itself else torch.mv(x.to(factor.dtype), factor)
            x = by.rounded(x, weight.dtype)
            if of_hidden is not None:
                by.add_of_hidden(of_hidden, x.t(), weight[part])
            if of_weight is not None:
                by.add_block_of_weight(of_weight[part], x, hidden, first)
        if of_hidden is not None and not itself:
            of_hidden *= factor[:, None]

    def _multiplied(self, powers: torch.Tensor, part: slice) -> torch.Tensor:
        x = torch.mul(powers, self.factor, out=self.block[: len(powers)])
        if self.rule.share:
            x -= self.rule.share * self.rule.scale * self.of_each
            if self.banned is not None:
                x.masked_fill_(self.banned[part], 0.0)
        return x


def _finite(most: torch.Tensor) -> torch.Tensor:
    return most.masked_fill(most.isinf(), 0.0)
