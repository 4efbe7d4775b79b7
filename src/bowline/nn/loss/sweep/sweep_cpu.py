"""The sweep on a CPU: chunks of tokens whose logits fit the budget, by whichever products are the faster.

Where the matrix's gradient is wanted, the first chunk's logits lie in the buffer of that gradient. Beyond the gradients
themselves there is, for what is left, a chunk of logits, and blocks that fit in a cache. Chunks are `turned`, but for
options that need `by_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bowline.nn.huge_pages import on_huge_pages
from bowline.nn.loss.sweep.by_rows import sweep_rows
from bowline.nn.loss.sweep.chunks import chunk_rows
from bowline.nn.loss.sweep.fastest import products_for
from bowline.nn.loss.sweep.job import Job, Sweep
from bowline.nn.loss.sweep.rule import Chunk
from bowline.nn.loss.sweep.turned import fits_turned, keeps_powers, sweep_turned, tokens_in_place
from bowline.nn.row_sums import add_rows

__all__ = ["sweep_on_cpu"]

Way = Callable[..., Chunk]
MOST_ROWS = 1024
"""Of a chunk of whose logits there is never more than a block, for want of a gradient that needs them twice."""

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
    losses, lse, own = torch.zeros(3, count, dtype=job.wide)
    ids = job.ids()
    of_hidden = torch.empty_like(hidden) if wanted.hidden else None
    of_bias = torch.zeros(size, dtype=job.wide) if wanted.bias else None
    by = products_for(hidden, weight, job.allowed)
    step = _step(job, count)
    of_weight = None
    if wanted.weight:
        of_weight = on_huge_pages(weight.new_empty(weight.shape)) if count else torch.zeros_like(weight)

    def take(part: slice, way: Way, **where: Any) -> None:
        product = torch.zeros(part.stop - part.start, width, dtype=job.wide) if wanted.hidden else None
        into = {"of_hidden": product, "of_weight": of_weight, "of_bias": of_bias}
        chunk = way(given.of(part), by, **into, **where, first=part.start == 0)
        losses[part], lse[part] = chunk.losses, chunk.lse
        if chunk.of_label is not None:
            own[part] = chunk.of_label
        if of_hidden is not None and product is not None:  # with the column of each row's label
            of_hidden[part] = product.add_(weight[ids[part]].to(hidden.dtype) * own[part, None])

    turned = fits_turned(job.options)
    given = job if turned else job.cast()
    if not turned:
        room = by.room(min(step, count), given.weight)
        for part in _parts(0, count, step):
            take(part, sweep_rows, room=room)
    else:
        in_place = 0 if of_weight is None else min(count, tokens_in_place(job))
        if in_place < step:
            in_place = 0
        step = _step(job, count - in_place)
        room = None
        if not keeps_powers(job, by):
            step = MOST_ROWS
        elif count > in_place:
            room = on_huge_pages(hidden.new_empty(size * step))
        if in_place:
            take(slice(0, in_place), sweep_turned, in_place=True, room=room)
        for part in _parts(in_place, count, step):
            take(part, sweep_turned, in_place=False, room=room)
    del room  # what follows has copies of hidden
    if of_weight is not None and count:
        add_rows(of_weight, ids, hidden, own, kernels=job.kernels)
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _parts(first: int, last: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, last)) for at in range(first, last, step)]


def _step(job: Job, count: int) -> int:
    """Rows of a chunk."""
    weight = job.weight
    return chunk_rows(count, len(weight), job.hidden.dtype, weight.device, job.allowed.scratch(weight))
