"""Processes a chunk of tokens with transposed logits (V, n), computed and consumed block by block of the vocabulary.

A first pass computes the powers e^(logit - base) of each block, sums them and multiplies them with the block of the
matrix, which is still in the cache; a second pass multiplies them with hidden. The base is one number for each token,
so the gradient of a logit is its power times a factor of its token. Hidden (n, D) and its gradient are multiplied by
that factor; the powers are not.

Transposed logits have two advantages. A product of few tokens is faster (by a tenth and more with MKL, because the
large matrix is read in its own layout). And a row of the matrix's gradient, D numbers, can hold the logits of n <= D
tokens. So the logits of the first tokens are stored in the buffer of that gradient, which is needed only afterwards:
for up to D tokens, whatever V is, the only memory beyond the gradient is blocks that fit in a cache. (oneDNN's results
lie as (n, b), block by block, and are transposed once, for the second pass.)

Powers are computed by `exp2`, which is torch's own. `exp` is MKL's: on AMD Zen 4 it takes three to four times as long,
and a hundred times as long for powers near 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from bowline.functional.loss.chunks.adapter_gradients import AdapterGradients
from bowline.functional.loss.chunks.cpu_matmul import contiguous_in
from bowline.functional.loss.chunks.loss_job import LossJob
from bowline.functional.loss.chunks.matmul import Hidden, Products
from bowline.functional.loss.chunks.softmax import banned_tokens, masked_chunk
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule, finite_or_0

__all__ = ["fits_transposed", "keeps_powers", "run_transposed", "tokens_in_place"]

BLOCK = 2**24
"""Bytes of a block: the three products of a block are faster with more rows than the steps between them need."""
LEAST_ROWS = 256
STRIPE = 16
"""Rows are an odd multiple of this, so that a column of a block is not all in one cache set when it is transposed.

With 2048 rows, transposing takes 1.6 ns a number; with 2064 rows, 0.7 (AMD Zen 4).
"""
CACHED = 2**19
"""Numbers that are turned into powers at once."""
MOST = {torch.float16: 2.0**14}
"""Sum of a block's powers above which the base is too low, by the dtype in which powers are stored."""
MOST_OF_OTHERS = 2.0**60
LOG2_E = 1 / math.log(2)
FAR = 2.0**10
"""Exponent above which the rounding of the base becomes visible."""


def fits_transposed(job: LossJob) -> bool:
    """Whether this file can compute the loss: not with softcap and smoothing together, as their gradient is not a
    multiple of a power; and replaced columns only where nothing is added to logits or powers afterwards.
    """
    options, replaced = job.options, job.adapters is not None and job.adapters.columns is not None
    if options.softcap is not None and options.label_smoothing:
        return False
    return not (replaced and (job.bias is not None or options.label_smoothing or job.hidden.dtype == torch.float16))


def tokens_in_place(job: LossJob, grad_weight: torch.dtype) -> int:
    """The number of tokens whose powers fit in the buffer of the matrix's gradient."""
    return job.weight.shape[1] * grad_weight.itemsize // job.hidden.itemsize


def keeps_powers(job: LossJob, by: Products) -> bool:
    """Whether the second pass needs the powers of the first."""
    left, right, columns = job.wanted.terms
    rows = job.wanted.hidden or left or columns
    return job.wanted.weight or job.wanted.bias or right or (rows and _multiplied(job, by))


def _multiplied(job: LossJob, by: Products) -> bool:
    """Whether each power, instead of hidden, is multiplied by its token's factor.

    Smoothing subtracts from that product; and in float16 hidden times factor would underflow to 0.
    """
    return bool(job.options.label_smoothing) or (job.hidden.dtype == torch.float16 and not by.widens)


@torch.no_grad()
def run_transposed(
    job: LossJob,
    by: Products,
    *,
    grad_hidden: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    first: bool,
    in_place: bool,
    room: torch.Tensor | None,
    part: slice,
    terms: AdapterGradients | None,
) -> Chunk:
    """The losses of hidden (n, D), and the products with the gradient of their logits.

    `in_place`: store the powers in the buffer of `grad_weight`, with n <= `tokens_in_place`; `room`, if any, is then
    memory for blocks. Otherwise `room` is memory for V n powers, or `None` if they are not stored. It is flat, in
    hidden's dtype. `grad_weight` (V, D) is overwritten by the `first` chunk and added to by the others. `grad_hidden`
    (n, D), of zeros, and `grad_bias` (V,), in float32 or wider, are added to. `terms` changes the logits of these rows,
    which are the rows `part` of all.
    """
    adapted = None if terms is None else _AdaptedRows(terms, part)
    count = len(job.hidden)
    if in_place and grad_weight is not None:
        passes = _TransposedChunk(job, by, grad_weight.view(job.hidden.dtype), room, grad_hidden, adapted)
    else:
        stored = None if room is None else room[: len(job.weight) * count].view(-1, count)
        passes = _TransposedChunk(job, by, stored, None, grad_hidden, adapted)
    chunk = passes.first_pass()
    passes.second_pass(grad_weight, grad_bias, first=first, in_place=in_place)
    return chunk if terms is None or not job.wanted.any() else terms.take_labels(part, passes.ids, chunk)


@dataclass(frozen=True, slots=True)
class _AdaptedRows:
    """The terms of adapters, and which rows of them the chunk has."""

    terms: AdapterGradients
    part: slice


class _TransposedChunk:
    """The two passes over the vocabulary, and the state that the second takes from the first."""

    def __init__(
        self,
        job: LossJob,
        by: Products,
        stored: torch.Tensor | None,
        room: torch.Tensor | None,
        grad_hidden: torch.Tensor | None,
        adapted: _AdaptedRows | None,
    ) -> None:
        size, (count, width) = len(job.weight), job.hidden.shape
        self.job, self.by, self.grad_hidden, self.adapted = job, by, grad_hidden, adapted
        self.rule = SoftmaxRule.of(job.options, size)
        self.multiplied = _multiplied(job, by)
        self.hidden, self.ids = by.ready(job.hidden), job.ids()
        self.cast_at: int | None = -1 if job.weight.dtype != job.hidden.dtype else None
        self.parts = self._parts(size, count, width)
        self.stored = None if stored is None else [self._block_of(stored, part) for part in self.parts]
        banned = banned_tokens(job.options.mask_ids, size, job.weight.device) if job.options.mask_ids else None
        self.banned = None if banned is None else banned[:, None]
        rows = self.parts[0].stop
        self.block = _carved(room, rows, count, by.logits_dtype(job.hidden))
        self.cast = job.weight.new_empty(0 if self.cast_at is None else rows, width, dtype=job.hidden.dtype)
        self.piece = job.hidden.new_empty(max(1, min(rows, CACHED // max(1, count))), count, dtype=job.wide)
        counted = job.labels != job.options.ignore_index
        self.counted, self.grad_each = counted, job.grad_loss.to(job.wide).masked_fill(~counted, 0.0)
        self.labelled = self._tokens_of_parts()
        self.label = job.hidden.new_zeros(count, dtype=job.wide)
        """The product at each label, rounded as it is in the lse."""

    def _parts(self, size: int, count: int, width: int) -> list[slice]:
        """Blocks of the vocabulary; smaller ones when oneDNN's results or casts need blocks besides the logits."""
        numbers = BLOCK // self.by.logits_dtype(self.job.hidden).itemsize
        if self.by.in_blocks or self.multiplied or self.cast_at is not None:
            numbers //= 2
        step = max(LEAST_ROWS, numbers // max(1, count, width))
        if not self.by.transposes and step > 2 * STRIPE:
            step = step // (2 * STRIPE) * (2 * STRIPE) - STRIPE
        return [slice(first, min(first + step, size)) for first in range(0, size, step)]

    def _tokens_of_parts(self) -> list[torch.Tensor]:
        """For each block, the tokens whose labels are in it."""
        order = self.ids.argsort()
        starts = self.ids.new_tensor([*(part.start for part in self.parts), len(self.job.weight)])
        bounds = torch.searchsorted(self.ids[order], starts).tolist()
        return [order[begin:end] for begin, end in pairwise(bounds)]

    # --- the first pass -----------------------------------------------------------------------------------------------

    def first_pass(self) -> Chunk:
        """The losses; stores the powers times the slope of the softcap, with 0 at each token's label."""
        job, rule, count = self.job, self.rule, len(self.ids)
        limit = MOST.get(job.hidden.dtype, MOST_OF_OTHERS)
        total, added = self.label.new_zeros(2, count)
        self.base = self.label.new_full((count,), -torch.inf)
        """For each token, the highest y of its first piece with unmasked tokens, or a later one if that is too low."""
        at = 0
        while at < len(self.parts):
            sums, more = self._make_powers(at)
            if (over := sums > limit).any():
                if self._raise_base(at, over):
                    at = 0
                    total, added = self.label.new_zeros(2, count)
                    if self.grad_hidden is not None:
                        self.grad_hidden.zero_()
                    if self.adapted is not None:
                        self.adapted.terms.restart(self.adapted.part)
                    continue
                sums, more = self._make_powers(at)  # only some tokens have an infinite logit
            self._use_powers(at)
            total += sums
            added += more
            at += 1
        label = self.label if job.bias is None else self.label + job.bias[self.ids]
        banned = None if self.banned is None else self.banned[self.ids, 0]
        lse = finite_or_0(self.base) * self.height + total.log()
        labelled = rule.logits(label)  # so that rounding never makes a loss negative
        lse = torch.maximum(lse, labelled if banned is None else labelled.masked_fill(banned, -torch.inf))
        chunk = rule.finish(label, lse, added * self.height, self.counted, self.grad_each, job.grad_lse)
        self.factor = total.reciprocal() * rule.p_factor(lse, self.grad_each, job.grad_lse) * rule.scale
        return chunk if banned is None else masked_chunk(chunk, banned, self.counted)

    def _matrix(self, at: int) -> torch.Tensor:
        """A block of the matrix, (b, D), in the dtype of the products."""
        weight = self.job.weight[self.parts[at]]
        if self.cast_at is None:
            return weight
        if self.cast_at != at:
            self.cast_at = at
            self.cast[: len(weight)].copy_(weight)
        return self.cast[: len(weight)]

    def _block_of(self, stored: torch.Tensor, part: slice) -> torch.Tensor:
        """Memory for the powers of a block, (b, n), in its rows of the buffer, in the layout of the product."""
        rows, count = part.stop - part.start, len(self.ids)
        flat = stored[part].view(-1)[: rows * count]
        return flat.view(rows, count) if self.by.transposes else flat.view(count, rows).t()

    def _make_logits(self, at: int) -> torch.Tensor:
        """The products of a block, (b, n); sets `powers` to the memory for their powers, if possible the stored."""
        matrix, rows = self._matrix(at), self.parts[at].stop - self.parts[at].start
        stored = None if self.stored is None else self.stored[at]
        if stored is None or stored.dtype != self.block.dtype:
            self.powers = self.by.make_transposed_logits(self.hidden, matrix, self.block[:rows])
            return self.powers
        self.powers = stored
        return self.by.make_transposed_logits(self.hidden, matrix, stored)

    def _pieces(self, at: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yields a block in pieces: memory for powers, y = logits / `height` in float32 or wider, and the mask."""
        part, made, labelled, rule = self.parts[at], self._make_logits(at), self.labelled[at], self.rule
        if self.adapted is not None:
            self.adapted.terms.change_block(made, part, self.adapted.part)
        self.label[labelled] = made[self.ids[labelled] - part.start, labelled].to(self.label.dtype)
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
        """The factor from y, a product or the tanh of a softcap, to the logit; 0 or more."""
        return abs(self.rule.scale) if self.rule.softcap is None else self.rule.softcap

    def _make_powers(self, at: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Computes a block's powers; returns their sums (n,) and, for smoothing, the sums of y."""
        base = finite_or_0(self.base)
        sums, added = base.new_zeros(2, len(base))
        for some, y, banned in self._pieces(at):
            if (self.base == -torch.inf).any():
                self.base = torch.where(self.base == -torch.inf, self._highest(y, banned), self.base)
                base = finite_or_0(self.base)
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
        """Y becomes the exponent LOG2_E (y - base) `height`, in place.

        One pass rounds the base's part; above `FAR`, where that is visible, two passes are used.
        """
        steepness = LOG2_E * self.height
        if base.abs().amax() * steepness > FAR:
            y.sub_(base).mul_(steepness)
        else:
            torch.add(base * -steepness, y, alpha=steepness, out=y)

    def _highest(self, y: torch.Tensor, banned: torch.Tensor | None) -> torch.Tensor:
        return (y if banned is None else y.masked_fill(banned, -torch.inf)).amax(0)

    def _raise_base(self, at: int, over: torch.Tensor) -> bool:
        """Raises the base to the highest y of a block for the tokens `over` the limit; whether any base changed."""
        before = self.base
        for _, y, banned in self._pieces(at):
            self.base = torch.where(over, torch.maximum(self.base, self._highest(y, banned)), self.base)
        return bool((self.base > before).any())

    def _use_powers(self, at: int) -> None:
        """Stores a block's powers, with 0 at each token's label, and multiplies them with the matrix."""
        part, powers, labelled = self.parts[at], self.powers, self.labelled[at]
        powers[self.ids[labelled] - part.start, labelled] = 0.0
        if self.adapted is not None:
            self.adapted.terms.take_columns(powers, part, self.adapted.part)
        if self.stored is not None and self.stored[at].dtype != powers.dtype:
            self.stored[at].copy_(powers)
        if not self.multiplied:
            self._add_grad_hidden(powers, at)

    def _add_grad_hidden(self, x: torch.Tensor, at: int) -> None:
        if self.adapted is not None:
            self.adapted.terms.add_left(x, self.parts[at], self.adapted.part)
        if self.grad_hidden is not None:
            x = self.by.rounded(x, self.job.hidden.dtype)
            self.by.add_grad_hidden(self.grad_hidden, x.t(), self._matrix(at))

    # --- the second pass ----------------------------------------------------------------------------------------------

    def second_pass(
        self, grad_weight: torch.Tensor | None, grad_bias: torch.Tensor | None, *, first: bool, in_place: bool
    ) -> None:
        """Computes the gradients, without the column of each token's label."""
        if self.grad_hidden is not None and not self.multiplied:
            self.grad_hidden *= self.factor[:, None]
        if self.adapted is not None and not self.multiplied:
            self.adapted.terms.multiply(self.adapted.part, self.factor)
        if self.stored is None:
            return
        hidden = self._right() if grad_weight is not None else self.hidden
        for at, (part, x) in enumerate(zip(self.parts, self.stored, strict=True)):
            if self.multiplied:
                x = self._gradient(x, at)
                self._add_grad_hidden(x, at)
            if self.adapted is not None:
                factor = None if self.multiplied else self.factor
                self.adapted.terms.add_right(x, part, self.adapted.part, factor)
            if grad_bias is not None:
                grad_bias[part] += x.sum(1) if self.multiplied else torch.mv(x.to(self.factor.dtype), self.factor)
            if grad_weight is not None:
                if not x.is_contiguous() or (in_place and not self.multiplied):
                    x = contiguous_in(self.block[: len(x)], x)
                x = self.by.rounded(x, self.job.hidden.dtype)
                self.by.add_block_grad_weight(grad_weight[part], x, hidden, first)

    def _right(self) -> Hidden:
        """The right factor of the matrix's gradient: hidden, times the factors unless the powers have them."""
        right = self.job.right_factor
        if self.multiplied:
            return self.hidden if right is self.job.hidden else self.by.ready(right)
        return self.by.ready(self.by.rounded(right.to(self.job.wide) * self.factor[:, None], right.dtype))

    def _gradient(self, powers: torch.Tensor, at: int) -> torch.Tensor:
        """The gradient of a block's products: powers times factors, minus the share of smoothing."""
        part, labelled = self.parts[at], self.labelled[at]
        x = torch.mul(powers, self.factor)
        if self.rule.share:
            x -= self.rule.share * self.rule.scale * self.grad_each
            x[self.ids[labelled] - part.start, labelled] = 0.0
            if self.banned is not None:
                x.masked_fill_(self.banned[part], 0.0)
        return x


def _carved(room: torch.Tensor | None, rows: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A block (rows, count), inside `room` if that is large enough."""
    size = rows * count * dtype.itemsize
    if room is None or room.nbytes < size:
        return torch.empty(rows, count, dtype=dtype, device="cpu")
    return room.view(torch.uint8)[:size].view(dtype).view(rows, count)
