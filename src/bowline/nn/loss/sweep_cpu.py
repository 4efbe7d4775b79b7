"""The sweep on a CPU: chunks of tokens whose logits fit the budget, by whichever products are the faster.

Where the matrix's gradient is wanted, the first chunk's logits lie in the buffer of that gradient. Beyond the gradients
themselves there is, for what is left, a chunk of logits, and blocks that fit in a cache. Chunks are `turned`, but for
options that need `by_rows`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bowline.nn.huge_pages import on_huge_pages
from bowline.nn.loss.by_rows import sweep_rows
from bowline.nn.loss.chunks import chunk_rows
from bowline.nn.loss.fastest import products_for
from bowline.nn.loss.job import Job, Sweep
from bowline.nn.loss.rule import Chunk
from bowline.nn.loss.turned import fits_turned, keeps_powers, sweep_turned
from bowline.nn.row_sums import add_rows

__all__ = ["sweep_on_cpu"]

Way = Callable[..., Chunk]
MOST_ROWS = 1024
"""Of a chunk of whose logits there is never more than a block, for want of a gradient that needs them twice."""


def sweep_on_cpu(job: Job) -> Sweep:
    """The losses, the lse, and the wanted gradients."""
    hidden, weight, bias, wanted = job.hidden, job.weight, job.bias, job.wanted
    count, (size, width) = len(hidden), weight.shape
    losses, lse, own = torch.zeros(3, count, dtype=job.wide)
    ids = job.ids()
    of_hidden = torch.empty_like(hidden) if wanted.hidden else None
    of_bias = torch.zeros(size, dtype=job.wide) if wanted.bias else None
    by = products_for(hidden, weight, job.allowed)
    step, done = _step(job, count), 0
    of_weight = None
    if wanted.weight:
        of_weight = on_huge_pages(torch.empty_like(weight)) if count else torch.zeros_like(weight)

    def take(part: slice, way: Way, room: torch.Tensor | None) -> None:
        product = torch.zeros(part.stop - part.start, width, dtype=job.wide) if wanted.hidden else None
        into = {"of_hidden": product, "of_weight": of_weight, "of_bias": of_bias}
        chunk = way(job.of(part), by, **into, first=part.start == 0, room=room)
        losses[part], lse[part] = chunk.losses, chunk.lse
        if chunk.of_label is not None:
            own[part] = chunk.of_label
        if of_hidden is not None and product is not None:  # with the column of each row's label
            of_hidden[part] = product.add_(weight[ids[part]].to(job.wide) * own[part, None])

    way = sweep_turned if fits_turned(job.options) else sweep_rows
    if way is sweep_turned and of_weight is not None and min(count, width) >= step:
        take(slice(0, done := min(count, width)), way, None)
        step = _step(job, count - done)
    room: torch.Tensor | None = None
    if way is sweep_rows:
        room = by.room(min(step, count - done), weight)
    elif keeps_powers(job, by):
        room = on_huge_pages(weight.new_empty(size, min(step, count - done)))
    else:
        step = MOST_ROWS
    for first in range(done, count, step):
        take(slice(first, min(first + step, count)), way, room)
    if of_weight is not None and count:
        add_rows(of_weight, ids, hidden, own, kernels=job.kernels)
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _step(job: Job, count: int) -> int:
    """Rows of a chunk."""
    weight = job.weight
    return chunk_rows(count, len(weight), weight.dtype, weight.device, job.allowed.scratch(weight))
