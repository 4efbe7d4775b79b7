"""The chunk loop on a CPU: chunks of tokens whose logits fit the budget, multiplied by the fastest library.

If the matrix's gradient is wanted, the logits of the first chunk lie in the buffer of that gradient. Apart from the
gradients, the other chunks need memory for one chunk of logits, and for blocks that fit in a cache. Chunks are
processed as in `transposed_logits`, except for options that need `row_major`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bowline.functional.kernels.huge_pages import on_huge_pages
from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.loss.chunks.chunk_size import chunk_rows
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.chunks.matmul_choice import products_for
from bowline.functional.loss.chunks.row_major import run_row_major
from bowline.functional.loss.chunks.softmax_formulas import Chunk
from bowline.functional.loss.chunks.transposed_logits import (
    fits_transposed,
    keeps_powers,
    run_transposed,
    tokens_in_place,
)

__all__ = ["run_on_cpu"]

Way = Callable[..., Chunk]
MOST_ROWS = 1024
"""Tokens in a chunk when no gradient needs the logits twice; then only a block of logits is in memory at once."""

MOST_SUMS = 8
"""Most chunks that are summed in a half-precision matrix's dtype; the sum of more chunks is kept in float32.

Each addition rounds: after 16 chunks in bf16, a row of the gradient had 2.3 times the error of eager's; after 512, it
had lost a quarter.
"""

FEW, ALIGNED = 256, 8
"""Above the first number of tokens, products are slow unless the number is a multiple of the second.

On AMD Zen 4 the three products take 1.18 times as long per token for 427 tokens as for 448 in bf16, 1.17 in float32.
"""


def run_on_cpu(job: LossJob) -> LossResult:
    """The losses, the lse, and the wanted gradients."""
    hidden, weight, bias, wanted = job.hidden, job.weight, job.bias, job.wanted
    count, (size, width) = len(hidden), weight.shape
    if count > FEW and count % ALIGNED:
        return run_on_cpu(job.padded(ALIGNED)).first(count)
    losses, lse, grad_label = hidden.new_zeros(3, count, dtype=job.wide)
    ids = job.ids()
    grad_hidden = torch.empty_like(hidden) if wanted.hidden else None
    grad_bias = hidden.new_zeros(size, dtype=job.wide) if wanted.bias else None
    by = products_for(hidden, weight, job.allowed)
    transposed, terms = fits_transposed(job), job.term_gradients()
    plan = _Plan.of(job, by, weight.dtype)
    if plan.chunks > MOST_SUMS:
        plan = _Plan.of(job, by, job.wide)
    grad_weight = None
    if wanted.weight:
        grad_weight = on_huge_pages(weight.new_empty(weight.shape, dtype=plan.sums))
        if not count:
            grad_weight.zero_()

    def take(rows: slice, way: Way, **where: Any) -> None:
        product = hidden.new_zeros(rows.stop - rows.start, width, dtype=job.wide) if wanted.hidden else None
        into = {"grad_hidden": product, "grad_weight": grad_weight, "grad_bias": grad_bias}
        chunk = way(given.of(rows), by, **into, **where, first=rows.start == 0)
        losses[rows], lse[rows] = chunk.losses, chunk.lse
        if chunk.grad_label is not None:
            grad_label[rows] = chunk.grad_label
        if grad_hidden is not None and product is not None:  # adds the column of each row's label
            grad_hidden[rows] = product.add_(weight[ids[rows]].to(hidden.dtype) * grad_label[rows, None])

    given = job if transposed else job.cast()
    room = None
    if not transposed:
        room = by.room(min(plan.step, count), given.weight)
    elif keeps_powers(job, by) and count > plan.in_place:
        room = on_huge_pages(hidden.new_empty(size * plan.step))
    if plan.in_place:
        part = slice(0, plan.in_place)
        take(part, run_transposed, in_place=True, room=room, part=part, terms=terms)
    for first in range(plan.in_place, count, plan.step):
        part = slice(first, min(first + plan.step, count))
        if transposed:
            take(part, run_transposed, in_place=False, room=room, part=part, terms=terms)
        else:
            take(part, run_row_major, room=room, ids=ids[part], part=part, terms=terms)
    del room  # the next steps copy hidden, and need the memory
    if grad_weight is not None and count:
        add_rows(grad_weight, ids, job.right_factor, grad_label, kernels=job.kernels)
        if plan.sums != weight.dtype:
            grad_weight = on_huge_pages(weight.new_empty(weight.shape)).copy_(grad_weight)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.index_add_(0, ids, grad_label).to(bias.dtype)
    return LossResult(
        losses=losses,
        lse=lse,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        terms=None if terms is None else terms.found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The chunk sizes: of the first chunk, whose powers lie in the buffer of the matrix's gradient, and of the others.

    `sums`: the dtype of that buffer, in which chunks are summed.
    """

    sums: torch.dtype
    in_place: int
    step: int
    chunks: int

    @staticmethod
    def of(job: LossJob, by: Products, sums: torch.dtype) -> _Plan:
        count = len(job.hidden)
        step, in_place = _rows(job, count), 0
        if fits_transposed(job):
            in_place = min(count, tokens_in_place(job, sums)) if job.wanted.weight else 0
            if in_place < step:
                in_place = 0
            step = _rows(job, count - in_place) if keeps_powers(job, by) else MOST_ROWS
        return _Plan(sums=sums, in_place=in_place, step=step, chunks=bool(in_place) + -(-(count - in_place) // step))


def _rows(job: LossJob, count: int) -> int:
    """The rows of a chunk when `count` tokens are split by the budget."""
    weight = job.weight
    return chunk_rows(count, len(weight), job.hidden.dtype, weight.device, job.scratch())
