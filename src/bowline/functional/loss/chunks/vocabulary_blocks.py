"""On a GPU, where the budget has no room for the sums of chunks: the gradient of the matrix block by block.

A first pass over blocks of the vocabulary makes the logits of all tokens in each, and finds every token's lse. A second
turns them into their gradient, and a block of the matrix's gradient is one product of all tokens, so no sum is kept.

Between the passes logits are kept where there is room. Those of D tokens lie in the matrix's gradient, a block's (D, b)
where its (b, D) will be, and cost nothing; those of some more in the budget. The others' are made twice: of n tokens of
which m are kept, that is 3 + (n - m) / n products. In the budget are also the gradient of hidden in float32, and a
block of the logits of all tokens, of `LEAST` rows of the vocabulary however small it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.chunk_size import TILE, padded
from bowline.functional.loss.chunks.gpu_matmul import GpuProducts
from bowline.functional.loss.chunks.label_gradient import add_own_rows
from bowline.functional.loss.chunks.loss_job import Job, Sweep
from bowline.functional.loss.chunks.softmax import banned_tokens, masked_chunk
from bowline.functional.loss.chunks.softmax_formulas import SoftmaxRule
from bowline.functional.loss.chunks.triton_block_kernels import add_to_lse, gradient_rows

__all__ = ["needs_blocks", "sweep_by_vocabulary"]

LEAST, MOST = 1024, 8192
"""Rows of the vocabulary in a block: a GPU multiplies fewer slowly; of more, the room keeps fewer tokens' logits."""


def needs_blocks(job: Job) -> bool:
    """Where chunks of tokens would need more than was allowed, and Triton's kernels can do what is between blocks."""
    weight, budget = job.weight, job.allowed.budget
    if budget is None or not job.wanted.weight or not (job.kernels and kernels_run_on(weight)):
        return False
    at_once = len(job.hidden) * padded(len(weight)) * weight.dtype.itemsize
    sums = weight.numel() * job.wide.itemsize  # which in the end are there beside the gradient
    return weight.dtype.itemsize == 2 and at_once > budget and sums > budget


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows of the vocabulary in a block; tokens whose logits are kept inside of the gradient, and beside it."""

    block: int
    inside: int
    beside: int

    @classmethod
    def of(cls, job: Job) -> Self:
        count, (size, width), item = len(job.hidden), job.weight.shape, job.weight.dtype.itemsize
        budget = job.allowed.scratch(job.weight)
        left = budget - (count * width * job.wide.itemsize if job.wanted.hidden else 0)
        tile = TILE["cuda"]
        fits = min(MOST, max(LEAST, left // (count * item) // tile * tile))
        blocks = -(-size // fits)
        block = min(size, -(-size // (blocks * tile)) * tile)
        last = size - (-(-size // block) - 1) * block
        inside = _taken(count, width * last // padded(last))
        left -= count * padded(block) * item
        beside = _taken(count - inside, max(0, left) // (padded(size) * item))
        return cls(block, inside, beside)


def _taken(tokens: int, room: int) -> int:
    """Of the tokens, all that there is room for, or a little fewer, that a GPU multiplies at once."""
    tile = TILE["cuda"]
    return tokens if tokens <= room else room // tile * tile or room


class _Blocks:
    """The logits of all tokens, block by block of the vocabulary, and where they lie between the passes."""

    def __init__(self, job: Job, plan: _Plan, of_weight: torch.Tensor) -> None:
        self.job, self.by, self.of_weight = job, GpuProducts(), of_weight
        size, count = len(job.weight), len(job.hidden)
        self.parts = [slice(first, min(first + plan.block, size)) for first in range(0, size, plan.block)]
        self.inside, self.beside = slice(0, plan.inside), slice(plan.inside, plan.inside + plan.beside)
        self.again = slice(self.beside.stop, count)
        self.more = self.by.room(plan.beside, job.weight)
        self.room = self.by.room(count, job.weight[: plan.block])

    def whole(self, part: slice) -> torch.Tensor:
        """Room for the logits of all tokens in a block (n, b)."""
        return self.room[:, : part.stop - part.start]

    def kept(self, part: slice) -> list[tuple[slice, torch.Tensor]]:
        """Some tokens, and their logits in a block; of the last, in `whole`, only until the next block."""
        places = [
            (self.inside, _within(self.of_weight[part], self.inside.stop)),
            (self.beside, self.more[:, part]),
            (self.again, self.whole(part)[self.again]),
        ]
        return [(rows, x) for rows, x in places if len(x)]

    def forget(self) -> None:
        """All but the gradient."""
        del self.room, self.more

    def make(self, rows: slice, part: slice, x: torch.Tensor) -> None:
        """The logits x of some tokens in a block."""
        bias = None if self.job.bias is None else self.job.bias[part]
        self.by.make_logits(self.by.ready(self.job.hidden[rows]), self.job.weight[part], bias, x)


def _within(gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """The memory of a block of the matrix's gradient (b, D), as the logits of some tokens (n, b), each row aligned."""
    width = len(gradient)
    return gradient.view(-1)[: rows * padded(width)].view(rows, padded(width))[:, :width]


def sweep_by_vocabulary(job: Job) -> Sweep:
    """The losses, the lse, and the wanted gradients; nothing is waited for."""
    of_weight = job.weight.new_empty(job.weight.shape)
    blocks = _Blocks(job, _Plan.of(job), of_weight)
    losses, lse = _first_pass(job, blocks)
    return _second_pass(job, blocks, losses, lse)


def _first_pass(job: Job, blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses and the lse, (n,) and (n,)."""
    size, labels, rule, banned = len(job.weight), job.labels.contiguous(), _rule(job), _banned(job)
    start = (torch.nan, -torch.inf, 0.0)  # what is no token has no logit
    label, lse, added = (job.hidden.new_full((len(labels),), one, dtype=job.wide) for one in start)
    for part in blocks.parts:
        out = None if banned is None else banned[part]
        for rows, x in blocks.kept(part):
            blocks.make(rows, part, x)
            add_to_lse(x, part.start, labels[rows], label[rows], lse[rows], added[rows], out, rule)
    counted = labels != job.options.ignore_index
    found = rule.finish(label, lse, added, counted, None, None)
    if banned is not None:
        known = (labels >= 0) & (labels < size)
        found = masked_chunk(found, known & banned[labels.clamp(0, size - 1)], counted)
    return found.losses, lse


def _second_pass(job: Job, blocks: _Blocks, losses: torch.Tensor, lse: torch.Tensor) -> Sweep:
    hidden, weight, by, of_weight = job.hidden, job.weight, blocks.by, blocks.of_weight
    ids, rule, banned = job.ids(), _rule(job), _banned(job)
    of_loss = job.of_loss.to(job.wide).masked_fill(job.labels == job.options.ignore_index, 0.0)
    of_p = rule.of_p(lse, of_loss, job.of_lse)
    nothing = of_loss == 0 if job.of_lse is None else (of_loss == 0) & (job.of_lse == 0)
    of_p = of_p.masked_fill(nothing, 0.0)  # whatever the lse is
    own = torch.zeros_like(of_p)
    product = hidden.new_zeros(hidden.shape, dtype=job.wide) if job.wanted.hidden else None
    of_bias = weight.new_empty(len(weight), dtype=job.wide) if job.wanted.bias else None
    right = job.right
    ready = by.ready(right)
    for part in blocks.parts:
        whole, out = blocks.whole(part), None if banned is None else banned[part]
        for rows, x in blocks.kept(part):
            if rows == blocks.again:
                blocks.make(rows, part, x)
            those = ids[rows], lse[rows], of_loss[rows], of_p[rows], own[rows]
            gradient_rows(x, part.start, *those, out, rule, whole[rows])
        by.add_of_weight(of_weight[part], whole, ready, first=True)
        if product is not None:
            by.add_of_hidden(product, whole, weight[part])
        if of_bias is not None:
            torch.sum(whole, 0, dtype=job.wide, out=of_bias[part])
    del whole, x
    blocks.forget()
    add_rows(of_weight, ids, right, own)
    if of_bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(weight.dtype)
    of_hidden = None
    if product is not None:
        of_hidden = add_own_rows(product, weight, ids, own, hidden.new_empty(hidden.shape))
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _rule(job: Job) -> SoftmaxRule:
    return SoftmaxRule.of(job.options, len(job.weight))


def _banned(job: Job) -> torch.Tensor | None:
    masked = job.options.mask_ids
    return banned_tokens(masked, len(job.weight), job.weight.device) if masked else None
