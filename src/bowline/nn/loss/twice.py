"""On a GPU, where the budget has no room for the sums of chunks: logits made twice, by tokens and by the vocabulary.

A first sweep over chunks of tokens finds each token's lse. A second goes over blocks of the vocabulary, with the logits
of all tokens in each; its part of the matrix's gradient is made by one product, and no sum of chunks is kept.
That is four products instead of three, and beyond the gradients only the logits of a chunk or of a block, and the
gradient of hidden in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bowline.nn.kernels import kernels_run_on
from bowline.nn.loss.chunks import padded
from bowline.nn.loss.gpu_products import GpuProducts
from bowline.nn.loss.job import Job, Sweep, Wanted
from bowline.nn.loss.own_rows import add_own_rows
from bowline.nn.loss.rule import Rule
from bowline.nn.loss.softmax import banned_tokens
from bowline.nn.loss.sweep_gpu import sweep_on_gpu
from bowline.nn.loss.triton_block import gradient_rows
from bowline.nn.row_sums import add_rows

__all__ = ["needs_twice", "sweep_twice"]

LEAST = 1024
"""Rows of the vocabulary in a block, at least: a GPU multiplies fewer slowly."""


def needs_twice(job: Job) -> bool:
    """Where three products would need more than was allowed, and Triton's kernels can do what is between four."""
    weight, budget = job.weight, job.allowed.budget
    if budget is None or not job.wanted.weight or not (job.kernels and kernels_run_on(weight)):
        return False
    at_once = len(job.hidden) * padded(len(weight)) * weight.dtype.itemsize
    sums = weight.numel() * job.wide.itemsize  # which in the end are there beside the gradient
    return weight.dtype.itemsize == 2 and at_once > budget and sums > budget


def sweep_twice(job: Job) -> Sweep:
    """What `sweep_on_gpu` gives; of that, the losses and the lse are made by it."""
    found = sweep_on_gpu(replace(job, wanted=Wanted()))
    hidden, weight, options, wanted = job.hidden, job.weight, job.options, job.wanted
    count, (size, width) = len(hidden), weight.shape
    by, rule, ids = GpuProducts(), Rule.of(options, size), job.ids()
    banned = banned_tokens(options.mask_ids, size, weight.device) if options.mask_ids else None
    of_loss = job.of_loss.to(job.wide).masked_fill(job.labels == options.ignore_index, 0.0)
    of_p = rule.of_p(found.lse, of_loss, job.of_lse)
    nothing = of_loss == 0 if job.of_lse is None else (of_loss == 0) & (job.of_lse == 0)
    of_p = of_p.masked_fill(nothing, 0.0)  # whatever the lse is
    own = torch.zeros_like(of_p)
    of_weight = weight.new_empty(weight.shape)
    product = hidden.new_zeros(count, width, dtype=job.wide) if wanted.hidden else None
    of_bias = weight.new_empty(size) if wanted.bias else None
    step = _block(job, count)
    room = by.room(count, weight[: min(step, size)])
    ready = by.ready(hidden)
    for first in range(0, size, step):
        part = slice(first, min(first + step, size))
        x = room[:, : part.stop - first]
        by.make_logits(ready, weight[part], None if job.bias is None else job.bias[part], x)
        gradient_rows(x, first, ids, found.lse, of_loss, of_p, own, None if banned is None else banned[part], rule)
        by.add_of_weight(of_weight[part], x, ready, first=True)
        if product is not None:
            by.add_of_hidden(product, x, weight[part])
        if of_bias is not None:
            torch.sum(x, 0, dtype=of_bias.dtype, out=of_bias[part])
    del room, x
    add_rows(of_weight, ids, hidden, own)
    if of_bias is not None:
        of_bias = of_bias.to(job.wide).index_add_(0, ids, own).to(weight.dtype)
    of_hidden = None
    if product is not None:
        of_hidden = add_own_rows(product, weight, ids, own, hidden.new_empty(hidden.shape))
    return replace(found, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _block(job: Job, count: int) -> int:
    """Rows of the vocabulary in a block: what fits beside the gradient of hidden in float32."""
    left = (job.allowed.budget or 0) - job.hidden.numel() * job.wide.itemsize
    fits = left // max(1, count * job.weight.dtype.itemsize)
    blocks = -(-len(job.weight) // max(LEAST, fits))
    return -(-len(job.weight) // (blocks * 128)) * 128
