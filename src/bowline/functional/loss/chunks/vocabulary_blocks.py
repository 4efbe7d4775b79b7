"""Computes the matrix's gradient block by block on a GPU, when the budget is too small for sums over chunks.

A first pass over blocks of the vocabulary computes the logits of all tokens in each block, and every token's lse. A
second pass turns the logits into their gradient. Each block of the matrix's gradient is then one product over all
tokens, so no sum has to be stored.

Logits are stored between the passes as far as memory allows. The logits of D tokens lie in the memory of the matrix's
gradient, (D, b) where a block's (b, D) will be, at no cost; the budget holds those of some more tokens. The logits of
the others are computed twice: if m of n tokens are stored, that makes 3 + (n - m) / n products. The budget also holds
the gradient of hidden in float32, and one block of the logits of all tokens, with at least `LEAST` rows of the
vocabulary even if the budget is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.chunk_size import TILE, padded
from bowline.functional.loss.chunks.gpu_matmul import GpuProducts
from bowline.functional.loss.chunks.label_gradient import add_label_rows
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult
from bowline.functional.loss.chunks.softmax import banned_tokens, masked_chunk
from bowline.functional.loss.chunks.softmax_formulas import SoftmaxRule
from bowline.functional.loss.chunks.triton_block_kernels import add_to_lse, gradient_rows

__all__ = ["needs_blocks", "run_by_vocabulary"]

LEAST, MOST = 1024, 8192
"""Fewest and most rows of the vocabulary in a block: fewer are slow; more leave memory for fewer tokens' logits."""


def needs_blocks(job: LossJob) -> bool:
    """Whether chunks of tokens would exceed the budget, and Triton kernels can run on this device."""
    weight, budget = job.weight, job.allowed.budget
    if (
        budget is None
        or job.adapters is not None
        or not job.wanted.weight
        or not (job.kernels and kernels_run_on(weight))
    ):
        return False
    at_once = len(job.hidden) * padded(len(weight)) * weight.dtype.itemsize
    sums = weight.numel() * job.wide.itemsize  # at the end, sums and gradient are both in memory
    return weight.dtype.itemsize == 2 and at_once > budget and sums > budget


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows of the vocabulary in a block; tokens whose logits are stored inside the gradient, and beside it."""

    block: int
    inside: int
    beside: int

    @classmethod
    def of(cls, job: LossJob) -> Self:
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
    """The number of tokens that fit, rounded down to whole tiles of a GPU if not all fit."""
    tile = TILE["cuda"]
    return tokens if tokens <= room else room // tile * tile or room


class _Blocks:
    """The logits of all tokens by block of the vocabulary, and the memory that stores them between the passes."""

    def __init__(self, job: LossJob, plan: _Plan, grad_weight: torch.Tensor) -> None:
        self.job, self.by, self.grad_weight = job, GpuProducts(), grad_weight
        size, count = len(job.weight), len(job.hidden)
        self.parts = [slice(first, min(first + plan.block, size)) for first in range(0, size, plan.block)]
        self.inside, self.beside = slice(0, plan.inside), slice(plan.inside, plan.inside + plan.beside)
        self.again = slice(self.beside.stop, count)
        self.more = self.by.room(plan.beside, job.weight)
        self.room = self.by.room(count, job.weight[: plan.block])

    def whole(self, part: slice) -> torch.Tensor:
        """Memory for the logits of all tokens in a block, (n, b)."""
        return self.room[:, : part.stop - part.start]

    def buffers(self, part: slice) -> list[tuple[slice, torch.Tensor]]:
        """Pairs of tokens and memory for their logits in a block; the last, in `whole`, lasts until the next block."""
        places = [
            (self.inside, _within(self.grad_weight[part], self.inside.stop)),
            (self.beside, self.more[:, part]),
            (self.again, self.whole(part)[self.again]),
        ]
        return [(rows, x) for rows, x in places if len(x)]

    def forget(self) -> None:
        """Frees all memory but the gradient."""
        del self.room, self.more

    def make(self, rows: slice, part: slice, x: torch.Tensor) -> None:
        """Computes the logits of some tokens in a block into x."""
        bias = None if self.job.bias is None else self.job.bias[part]
        self.by.make_logits(self.by.ready(self.job.hidden[rows]), self.job.weight[part], bias, x)


def _within(gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """The memory of a gradient block (b, D), viewed as logits (n, b) with aligned rows."""
    width = len(gradient)
    return gradient.view(-1)[: rows * padded(width)].view(rows, padded(width))[:, :width]


def run_by_vocabulary(job: LossJob) -> LossResult:
    """The losses, the lse, and the wanted gradients, without waiting for the GPU."""
    grad_weight = job.weight.new_empty(job.weight.shape)
    blocks = _Blocks(job, _Plan.of(job), grad_weight)
    losses, lse = _first_pass(job, blocks)
    return _second_pass(job, blocks, losses, lse)


def _first_pass(job: LossJob, blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses and the lse, (n,) and (n,)."""
    size, labels, rule, banned = len(job.weight), job.labels.contiguous(), _rule(job), _banned(job)
    start = (torch.nan, -torch.inf, 0.0)  # a label that is not a token has no logit
    label, lse, added = (job.hidden.new_full((len(labels),), one, dtype=job.wide) for one in start)
    for part in blocks.parts:
        out = None if banned is None else banned[part]
        for rows, x in blocks.buffers(part):
            blocks.make(rows, part, x)
            add_to_lse(x, part.start, labels[rows], label[rows], lse[rows], added[rows], out, rule)
    counted = labels != job.options.ignore_index
    found = rule.finish(label, lse, added, counted, None, None)
    if banned is not None:
        known = (labels >= 0) & (labels < size)
        found = masked_chunk(found, known & banned[labels.clamp(0, size - 1)], counted)
    return found.losses, lse


def _second_pass(job: LossJob, blocks: _Blocks, losses: torch.Tensor, lse: torch.Tensor) -> LossResult:
    hidden, weight, by, grad_weight = job.hidden, job.weight, blocks.by, blocks.grad_weight
    ids, rule, banned = job.ids(), _rule(job), _banned(job)
    grad_loss = job.grad_loss.to(job.wide).masked_fill(job.labels == job.options.ignore_index, 0.0)
    p_factor = rule.p_factor(lse, grad_loss, job.grad_lse)
    nothing = grad_loss == 0 if job.grad_lse is None else (grad_loss == 0) & (job.grad_lse == 0)
    p_factor = p_factor.masked_fill(nothing, 0.0)  # even if the lse is infinite
    grad_label = torch.zeros_like(p_factor)
    product = hidden.new_zeros(hidden.shape, dtype=job.wide) if job.wanted.hidden else None
    grad_bias = weight.new_empty(len(weight), dtype=job.wide) if job.wanted.bias else None
    right = job.right_factor
    ready = by.ready(right)
    for part in blocks.parts:
        whole, out = blocks.whole(part), None if banned is None else banned[part]
        for rows, x in blocks.buffers(part):
            if rows == blocks.again:
                blocks.make(rows, part, x)
            those = ids[rows], lse[rows], grad_loss[rows], p_factor[rows], grad_label[rows]
            gradient_rows(x, part.start, *those, out, rule, whole[rows])
        by.add_grad_weight(grad_weight[part], whole, ready, first=True)
        if product is not None:
            by.add_grad_hidden(product, whole, weight[part])
        if grad_bias is not None:
            torch.sum(whole, 0, dtype=job.wide, out=grad_bias[part])
    del whole, x
    blocks.forget()
    add_rows(grad_weight, ids, right, grad_label)
    if grad_bias is not None:
        grad_bias = grad_bias.index_add_(0, ids, grad_label).to(weight.dtype)
    grad_hidden = None
    if product is not None:
        grad_hidden = add_label_rows(product, weight, ids, grad_label, hidden.new_empty(hidden.shape))
    return LossResult(losses=losses, lse=lse, grad_hidden=grad_hidden, grad_weight=grad_weight, grad_bias=grad_bias)


def _rule(job: LossJob) -> SoftmaxRule:
    return SoftmaxRule.of(job.options, len(job.weight))


def _banned(job: LossJob) -> torch.Tensor | None:
    masked = job.options.mask_ids
    return banned_tokens(masked, len(job.weight), job.weight.device) if masked else None
