"""The sweep on a CPU: chunks of tokens whose logits fit the budget, by whichever products are the faster.

Where the matrix's gradient is wanted, the first chunk's logits lie in the buffer of that gradient. Beyond the gradients
themselves there is, for what is left, a chunk of logits, and blocks that fit in a cache. Chunks are `turned`, but for
options that need `by_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bowline.functional.kernels.huge_pages import on_huge_pages
from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.loss.chunks.chunk_size import chunk_rows
from bowline.functional.loss.chunks.loss_job import Job, Sweep
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.chunks.matmul_choice import products_for
from bowline.functional.loss.chunks.row_major import sweep_rows
from bowline.functional.loss.chunks.softmax_formulas import Chunk
from bowline.functional.loss.chunks.transposed_logits import fits_turned, keeps_powers, sweep_turned, tokens_in_place

__all__ = ["sweep_on_cpu"]

Way = Callable[..., Chunk]
MOST_ROWS = 1024
"""Of a chunk of whose logits there is never more than a block, for want of a gradient that needs them twice."""

MOST_SUMS = 8
"""Chunks that are added up in the dtype of the matrix where that is half precision; more are added up in float32.

Each sum is rounded: after 16 chunks of bf16 a row of the gradient was 2.3 times as far off as eager's, after 512 it had
lost a quarter.
"""

FEW, ALIGNED = 256, 8
"""Of more tokens than the first, a number that is no multiple of the second makes products slow.

On AMD Zen 4 the three of 427 tokens take, for each, 1.18 of the time of 448 in bf16, 1.17 in float32.
"""


def sweep_on_cpu(job: Job) -> Sweep:
    """The losses, the lse, and the wanted gradients."""
    hidden, weight, bias, wanted = job.hidden, job.weight, job.bias, job.wanted
    count, (size, width) = len(hidden), weight.shape
    if count > FEW and count % ALIGNED:
        return sweep_on_cpu(job.padded(ALIGNED)).first(count)
    losses, lse, own = hidden.new_zeros(3, count, dtype=job.wide)
    ids = job.ids()
    of_hidden = torch.empty_like(hidden) if wanted.hidden else None
    of_bias = hidden.new_zeros(size, dtype=job.wide) if wanted.bias else None
    by = products_for(hidden, weight, job.allowed)
    turned = fits_turned(job.options)
    plan = _Plan.of(job, by, weight.dtype)
    if plan.chunks > MOST_SUMS:
        plan = _Plan.of(job, by, job.wide)
    of_weight = None
    if wanted.weight:
        of_weight = on_huge_pages(weight.new_empty(weight.shape, dtype=plan.sums))
        if not count:
            of_weight.zero_()

    def take(part: slice, way: Way, **where: Any) -> None:
        product = hidden.new_zeros(part.stop - part.start, width, dtype=job.wide) if wanted.hidden else None
        into = {"of_hidden": product, "of_weight": of_weight, "of_bias": of_bias}
        chunk = way(given.of(part), by, **into, **where, first=part.start == 0)
        losses[part], lse[part] = chunk.losses, chunk.lse
        if chunk.of_label is not None:
            own[part] = chunk.of_label
        if of_hidden is not None and product is not None:  # with the column of each row's label
            of_hidden[part] = product.add_(weight[ids[part]].to(hidden.dtype) * own[part, None])

    given = job if turned else job.cast()
    room = None
    if not turned:
        room = by.room(min(plan.step, count), given.weight)
    elif keeps_powers(job, by) and count > plan.in_place:
        room = on_huge_pages(hidden.new_empty(size * plan.step))
    if plan.in_place:
        take(slice(0, plan.in_place), sweep_turned, in_place=True, room=room)
    for first in range(plan.in_place, count, plan.step):
        part = slice(first, min(first + plan.step, count))
        if turned:
            take(part, sweep_turned, in_place=False, room=room)
        else:
            take(part, sweep_rows, room=room)
    del room  # what follows has copies of hidden
    if of_weight is not None and count:
        add_rows(of_weight, ids, job.right, own, kernels=job.kernels)
        if plan.sums != weight.dtype:
            of_weight = on_huge_pages(weight.new_empty(weight.shape)).copy_(of_weight)
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The chunks: of the first tokens, whose powers lie in the buffer of the matrix's gradient, and of the others.

    `sums`: the dtype of that buffer, in which chunks are added up.
    """

    sums: torch.dtype
    in_place: int
    step: int
    chunks: int

    @staticmethod
    def of(job: Job, by: Products, sums: torch.dtype) -> _Plan:
        count = len(job.hidden)
        step, in_place = _rows(job, count), 0
        if fits_turned(job.options):
            in_place = min(count, tokens_in_place(job, sums)) if job.wanted.weight else 0
            if in_place < step:
                in_place = 0
            step = _rows(job, count - in_place) if keeps_powers(job, by) else MOST_ROWS
        return _Plan(sums=sums, in_place=in_place, step=step, chunks=bool(in_place) + -(-(count - in_place) // step))


def _rows(job: Job, count: int) -> int:
    """Of a chunk of `count` tokens."""
    weight = job.weight
    return chunk_rows(count, len(weight), job.hidden.dtype, weight.device, job.allowed.scratch(weight))
