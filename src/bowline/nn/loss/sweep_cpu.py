"""The sweep on a CPU: chunks of tokens whose logits fit the budget, by whichever products are the faster.

Where the matrix's gradient is wanted, the first chunk's logits lie in the buffer of that gradient. Beyond the gradients
themselves there is, for what is left, a chunk of logits, and blocks that fit in a cache.
"""

from __future__ import annotations

import torch

from bowline.nn.loss.chunks import chunk_rows
from bowline.nn.loss.fastest import products_for
from bowline.nn.loss.in_place import fits_in_place, sweep_in_place
from bowline.nn.loss.job import Job, Sweep
from bowline.nn.loss.rule import Chunk
from bowline.nn.loss.softmax import chunk_loss
from bowline.nn.row_sums import add_rows

__all__ = ["sweep_on_cpu"]


def sweep_on_cpu(job: Job) -> Sweep:
    """The losses, the lse, and the wanted gradients."""
    hidden, weight, bias, options, wanted = job.hidden, job.weight, job.bias, job.options, job.wanted
    count, (size, width) = len(hidden), weight.shape
    losses, lse, own = torch.zeros(3, count, dtype=job.wide)
    ids = job.ids()
    of_hidden = torch.empty_like(hidden) if wanted.hidden else None
    of_bias = torch.zeros(size, dtype=job.wide) if wanted.bias else None
    by = products_for(hidden, weight, job.allowed)
    step, done = _step(job, count), 0
    of_weight = None
    if wanted.weight:
        of_weight = by.sums(weight, -(-count // step)) if count else torch.zeros_like(weight)

    def keep(part: slice, found: Chunk, product: torch.Tensor | None) -> None:
        """`product`: of the gradient of hidden, what is not the column of each row's label, which is `own`."""
        losses[part], lse[part] = found.losses, found.lse
        if found.of_label is not None:
            own[part] = found.of_label
        if of_hidden is not None and product is not None:
            of_hidden[part] = product.add_(weight[ids[part]].to(job.wide) * own[part, None])

    if of_weight is not None and fits_in_place(options) and min(count, width) >= step:
        part = slice(done := min(count, width))
        product = torch.zeros(done, width, dtype=job.wide) if wanted.hidden else None
        chunk = sweep_in_place(job.of(part), by, of_weight=of_weight, of_hidden=product, of_bias=of_bias)
        keep(part, chunk, product)
        step = _step(job, count - done)
    room = by.room(min(step, count - done), weight)
    for first in range(done, count, step):
        part = slice(first, min(first + step, count))
        ready, x = by.ready(hidden[part]), room[: part.stop - part.start]
        by.make_logits(ready, weight, bias, x)
        of_loss = job.of_loss[part] if wanted.any() else None
        of_lse = None if job.of_lse is None else job.of_lse[part]
        chunk = chunk_loss(x, job.labels[part], of_loss, of_lse, options, job.allowed)
        keep(part, chunk, by.make_of_hidden(x, weight) if wanted.hidden else None)
        if of_weight is not None:
            by.add_of_weight(of_weight, x, ready, first == 0)
        if of_bias is not None:
            of_bias += x.sum(0, dtype=job.wide)
    if of_weight is not None and count:
        add_rows(of_weight, ids, hidden, own, kernels=job.kernels)
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _step(job: Job, count: int) -> int:
    """Rows of a chunk."""
    weight = job.weight
    return chunk_rows(count, len(weight), weight.dtype, weight.device, job.allowed.scratch(weight))
