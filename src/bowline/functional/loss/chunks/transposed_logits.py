"""A chunk of tokens whose logits lie turned, (V, n): made, and used up, block by block of the vocabulary.

A first pass makes the powers e^(logit - base) of each block, adds them up and multiplies them with the block of the
matrix, which is still in the cache; a second multiplies them with hidden. The base is a number for each token, so the
gradient of a logit is its power times a factor of the token, and hidden (n, D) and its gradient are multiplied by that
factor, not the powers.

Turned, because a product of few tokens is faster so (a tenth and more with MKL: the large matrix is read as it lies);
and because a row of the matrix's gradient, D numbers, has room for the logits of n <= D tokens. So the first tokens'
are kept in the buffer of that gradient, which is not needed before they are done with: for as many as D tokens,
whatever V is, there are beyond the gradient only blocks that fit in a cache. (What oneDNN makes lies as (n, b), block
by block, and is turned once, for the second pass.)

Powers are made by `exp2`, which is torch's own. `exp` is MKL's: on AMD Zen 4 it takes three to four times as long, and
a hundred times where a power is nearly 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from bowline.functional.loss.chunks.cpu_matmul import turned_in
from bowline.functional.loss.chunks.loss_job import Job
from bowline.functional.loss.chunks.matmul import Hidden, Products
from bowline.functional.loss.chunks.softmax import banned_tokens, masked_chunk
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule
from bowline.functional.loss.loss_options import Options

__all__ = ["fits_turned", "keeps_powers", "sweep_turned", "tokens_in_place"]

BLOCK = 2**24
"""Bytes of a block: three products are made of each, which like more rows than what is between them."""
LEAST_ROWS = 256
STRIPE = 16
"""Of rows an odd multiple of it, so that a column of a block, which is read to turn it, is not all in one cache set.

Of 2048 rows a number takes 1.6 ns to turn, of 2064 0.7 (AMD Zen 4).
"""
CACHED = 2**19
"""Numbers in what is made powers at once."""
MOST = {torch.float16: 2.0**14}
"""Sums of a block's powers from which on the base is too low, by the dtype in which powers are kept."""
MOST_OF_OTHERS = 2.0**60
LOG2_E = 1 / math.log(2)
FAR = 2.0**10
"""An exponent of which half a unit in the last place is not nothing any more."""


def fits_turned(options: Options) -> bool:
    """Not with a softcap and smoothing at once, whose gradient is no multiple of a power."""
    return not (options.softcap is not None and options.label_smoothing)


def tokens_in_place(job: Job, of_weight: torch.dtype) -> int:
    """How many tokens' powers the buffer of the matrix's gradient has room for."""
    return job.weight.shape[1] * of_weight.itemsize // job.hidden.itemsize


def keeps_powers(job: Job, by: Products) -> bool:
    """Whether powers are needed again after the first pass."""
    return job.wanted.weight or job.wanted.bias or (job.wanted.hidden and _multiplied(job, by))


def _multiplied(job: Job, by: Products) -> bool:
    """Whether each power is multiplied by its token's factor, not hidden.

    Smoothing takes something off the product; and in float16 hidden times factor would be 0.
    """
    return bool(job.options.label_smoothing) or (job.hidden.dtype == torch.float16 and not by.widens)


@torch.no_grad()
def sweep_turned(
    job: Job,
    by: Products,
    *,
    of_hidden: torch.Tensor | None,
    of_weight: torch.Tensor | None,
    of_bias: torch.Tensor | None,
    first: bool,
    in_place: bool,
    room: torch.Tensor | None,
) -> Chunk:
    """The losses of hidden (n, D), and the products with the gradient of their logits.

    `in_place`: the powers lie in the buffer of `of_weight`, n <= `tokens_in_place`, and `room`, where there is any, is
    for blocks; else it is for V n powers, or `None` where they are not kept. It is flat, of hidden's dtype. Where it is
    the `first` chunk, `of_weight` (V, D), whatever is in it, is made, else added to; `of_hidden` (n, D), of zeros, and
    `of_bias` (V,), in float32 or wider, are added to.
    """
    count = len(job.hidden)
    if in_place and of_weight is not None:
        sweep = _Turned(job, by, of_weight.view(job.hidden.dtype), room, of_hidden)
    else:
        kept = None if room is None else room[: len(job.weight) * count].view(-1, count)
        sweep = _Turned(job, by, kept, None, of_hidden)
    chunk = sweep.first_pass()
    sweep.second_pass(of_weight, of_bias, first=first, in_place=in_place)
    return chunk


class _Turned:
    """The two passes over the vocabulary, and what the second knows from the first."""

    def __init__(
        self,
        job: Job,
        by: Products,
        kept: torch.Tensor | None,
        room: torch.Tensor | None,
        of_hidden: torch.Tensor | None,
    ) -> None:
        size, (count, width) = len(job.weight), job.hidden.shape
        self.job, self.by, self.of_hidden = job, by, of_hidden
        self.rule = SoftmaxRule.of(job.options, size)
        self.multiplied = _multiplied(job, by)
        self.hidden, self.ids = by.ready(job.hidden), job.ids()
        self.cast_at: int | None = -1 if job.weight.dtype != job.hidden.dtype else None
        self.parts = self._parts(size, count, width)
        self.kept = None if kept is None else [self._block_of(kept, part) for part in self.parts]
        banned = banned_tokens(job.options.mask_ids, size, job.weight.device) if job.options.mask_ids else None
        self.banned = None if banned is None else banned[:, None]
        rows = self.parts[0].stop
        self.block = _carved(room, rows, count, by.dtype_of_logits(job.hidden))
        self.cast = job.weight.new_empty(0 if self.cast_at is None else rows, width, dtype=job.hidden.dtype)
        self.piece = job.hidden.new_empty(max(1, min(rows, CACHED // max(1, count))), count, dtype=job.wide)
        counted = job.labels != job.options.ignore_index
        self.counted, self.of_each = counted, job.of_loss.to(job.wide).masked_fill(~counted, 0.0)
        self.own = self._tokens_of_parts()
        self.label = job.hidden.new_zeros(count, dtype=job.wide)
        """Each label's product, rounded as it is in its lse."""

    def _parts(self, size: int, count: int, width: int) -> list[slice]:
        """Smaller ones where beside that of logits there are others: of what oneDNN makes, or of what is cast."""
        numbers = BLOCK // self.by.dtype_of_logits(self.job.hidden).itemsize
        if self.by.in_blocks or self.multiplied or self.cast_at is not None:
            numbers //= 2
        step = max(LEAST_ROWS, numbers // max(1, count, width))
        if not self.by.turns and step > 2 * STRIPE:
            step = step // (2 * STRIPE) * (2 * STRIPE) - STRIPE
        return [slice(first, min(first + step, size)) for first in range(0, size, step)]

    def _tokens_of_parts(self) -> list[torch.Tensor]:
        """Those whose labels are in it."""
        order = self.ids.argsort()
        starts = self.ids.new_tensor([*(part.start for part in self.parts), len(self.job.weight)])
        bounds = torch.searchsorted(self.ids[order], starts).tolist()
        return [order[begin:end] for begin, end in pairwise(bounds)]

    # --- the first pass -----------------------------------------------------------------------------------------------

    def first_pass(self) -> Chunk:
        """The losses; the powers times the slope of the softcap are kept, less that of each token's own label."""
        job, rule, count = self.job, self.rule, len(self.ids)
        limit = MOST.get(job.hidden.dtype, MOST_OF_OTHERS)
        total, added = self.label.new_zeros(2, count)
        self.base = self.label.new_full((count,), -torch.inf)
        """The highest y of the first that are not masked; of others where that is too low."""
        at = 0
        while at < len(self.parts):
            sums, more = self._make_powers(at)
            if (over := sums > limit).any():
                if self._raise_base(at, over):
                    at = 0
                    total, added = self.label.new_zeros(2, count)
                    if self.of_hidden is not None:
                        self.of_hidden.zero_()
                    continue
                sums, more = self._make_powers(at)  # a logit is infinite: the other tokens' are not
            self._use_powers(at)
            total += sums
            added += more
            at += 1
        label = self.label if job.bias is None else self.label + job.bias[self.ids]
        banned = None if self.banned is None else self.banned[self.ids, 0]
        lse = _finite(self.base) * self.height + total.log()
        own = rule.logits(label)  # of a sure token the same number, and a loss is not below 0
        lse = torch.maximum(lse, own if banned is None else own.masked_fill(banned, -torch.inf))
        chunk = rule.finish(label, lse, added * self.height, self.counted, self.of_each, job.of_lse)
        self.factor = total.reciprocal() * rule.of_p(lse, self.of_each, job.of_lse) * rule.scale
        return chunk if banned is None else masked_chunk(chunk, banned, self.counted)

    def _matrix(self, at: int) -> torch.Tensor:
        """A part of it, (b, D), in the dtype of the products."""
        weight = self.job.weight[self.parts[at]]
        if self.cast_at is None:
            return weight
        if self.cast_at != at:
            self.cast_at = at
            self.cast[: len(weight)].copy_(weight)
        return self.cast[: len(weight)]

    def _block_of(self, kept: torch.Tensor, part: slice) -> torch.Tensor:
        """Room for the powers of a part, (b, n), in its rows; they lie there as they are made."""
        rows, count = part.stop - part.start, len(self.ids)
        flat = kept[part].view(-1)[: rows * count]
        return flat.view(rows, count) if self.by.turns else flat.view(count, rows).t()

    def _make_logits(self, at: int) -> torch.Tensor:
        """Products of a part, (b, n); `powers`: where theirs belong, which is where they are kept, if they can be."""
        matrix, rows = self._matrix(at), self.parts[at].stop - self.parts[at].start
        kept = None if self.kept is None else self.kept[at]
        if kept is None or kept.dtype != self.block.dtype:
            self.powers = self.by.make_turned_logits(self.hidden, matrix, self.block[:rows])
            return self.powers
        self.powers = kept
        return self.by.make_turned_logits(self.hidden, matrix, kept)

    def _pieces(self, at: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Piece by piece of a part: where its powers belong, logits / `height` in float32 or wider, what is masked."""
        part, made, own, rule = self.parts[at], self._make_logits(at), self.own[at], self.rule
        self.label[own] = made[self.ids[own] - part.start, own].to(self.label.dtype)
        for first in range(part.start, part.stop, len(self.piece)):
            rows = slice(first, min(first + len(self.piece), part.stop))
            within = slice(rows.start - part.start, rows.stop - part.start)
            y = made[within]
            if y.dtype != self.piece.dtype:
                y = self.piece[: len(y)].copy_(y)
            if self.job.bias is not None:
                y += self.job.bias[rows, None]
            if rule.softcap is not None:
                y.mul_(rule.scale / rule.softcap).tanh_()
            elif rule.scale < 0:
                y.neg_()
            yield self.powers[within], y, None if self.banned is None else self.banned[rows]

    @property
    def height(self) -> float:
        """What y, a product or the tanh of a softcap, is multiplied by to be a logit; 0 or more."""
        return abs(self.rule.scale) if self.rule.softcap is None else self.rule.softcap

    def _make_powers(self, at: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Of a part; the sums (n,) of the powers, and for a loss with smoothing those of y."""
        base = _finite(self.base)
        sums, added = base.new_zeros(2, len(base))
        for some, y, banned in self._pieces(at):
            if (self.base == -torch.inf).any():
                self.base = torch.where(self.base == -torch.inf, self._highest(y, banned), self.base)
                base = _finite(self.base)
            if self.rule.share:
                added += (y if banned is None else y.masked_fill(banned, 0.0)).sum(0)
            slope = None if self.rule.softcap is None else 1 - y.square()
            self._to_exponents(y, base)
            y = torch.exp2(y, out=some if some.dtype == y.dtype else y)
            if banned is not None:
                y.masked_fill_(banned, 0.0)
            sums += y.sum(0)
            if slope is not None:
                y *= slope
            if y.dtype != some.dtype:
                some.copy_(y)
        return sums, added

    def _to_exponents(self, y: torch.Tensor, base: torch.Tensor) -> None:
        """LOG2_E (y - base) in place: in one pass, which rounds that of the base, or in two, where that would show."""
        steepness = LOG2_E * self.height
        if base.abs().amax() * steepness > FAR:
            y.sub_(base).mul_(steepness)
        else:
            torch.add(base * -steepness, y, alpha=steepness, out=y)

    def _highest(self, y: torch.Tensor, banned: torch.Tensor | None) -> torch.Tensor:
        return (y if banned is None else y.masked_fill(banned, -torch.inf)).amax(0)

    def _raise_base(self, at: int, over: torch.Tensor) -> bool:
        """To the highest y of a part, for the tokens `over` it, and whether that is higher."""
        before = self.base
        for _, y, banned in self._pieces(at):
            self.base = torch.where(over, torch.maximum(self.base, self._highest(y, banned)), self.base)
        return bool((self.base > before).any())

    def _use_powers(self, at: int) -> None:
        """Of a part: without each token's own label they are kept, and multiplied with the matrix."""
        part, powers, own = self.parts[at], self.powers, self.own[at]
        powers[self.ids[own] - part.start, own] = 0.0
        if self.kept is not None and self.kept[at].dtype != powers.dtype:
            self.kept[at].copy_(powers)
        if not self.multiplied:
            self._add_of_hidden(powers, at)

    def _add_of_hidden(self, x: torch.Tensor, at: int) -> None:
        if self.of_hidden is not None:
            x = self.by.rounded(x, self.job.hidden.dtype)
            self.by.add_of_hidden(self.of_hidden, x.t(), self._matrix(at))

    # --- the second pass ----------------------------------------------------------------------------------------------

    def second_pass(
        self, of_weight: torch.Tensor | None, of_bias: torch.Tensor | None, *, first: bool, in_place: bool
    ) -> None:
        """The gradients, without the column of each token's own label."""
        if self.of_hidden is not None and not self.multiplied:
            self.of_hidden *= self.factor[:, None]
        if self.kept is None:
            return
        hidden = self._right() if of_weight is not None else self.hidden
        for at, (part, x) in enumerate(zip(self.parts, self.kept, strict=True)):
            if self.multiplied:
                x = self._gradient(x, at)
                self._add_of_hidden(x, at)
            if of_bias is not None:
                of_bias[part] += x.sum(1) if self.multiplied else torch.mv(x.to(self.factor.dtype), self.factor)
            if of_weight is not None:
                if not x.is_contiguous() or (in_place and not self.multiplied):
                    x = turned_in(self.block[: len(x)], x)
                x = self.by.rounded(x, self.job.hidden.dtype)
                self.by.add_block_of_weight(of_weight[part], x, hidden, first)

    def _right(self) -> Hidden:
        """Of the product that makes the gradient of the matrix: hidden, times the factors where powers are not."""
        right = self.job.right
        if self.multiplied:
            return self.hidden if right is self.job.hidden else self.by.ready(right)
        return self.by.ready(self.by.rounded(right.to(self.job.wide) * self.factor[:, None], right.dtype))

    def _gradient(self, powers: torch.Tensor, at: int) -> torch.Tensor:
        """Of a part's products: powers times factors, less what smoothing takes off."""
        part, own = self.parts[at], self.own[at]
        x = torch.mul(powers, self.factor)
        if self.rule.share:
            x -= self.rule.share * self.rule.scale * self.of_each
            x[self.ids[own] - part.start, own] = 0.0
            if self.banned is not None:
                x.masked_fill_(self.banned[part], 0.0)
        return x


def _carved(room: torch.Tensor | None, rows: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A block (rows, count), in the room where there is enough."""
    size = rows * count * dtype.itemsize
    if room is None or room.nbytes < size:
        return torch.empty(rows, count, dtype=dtype, device="cpu")
    return room.view(torch.uint8)[:size].view(dtype).view(rows, count)


def _finite(most: torch.Tensor) -> torch.Tensor:
    return most.masked_fill(most.isinf(), 0.0)
