"""The sweep on a GPU: three products of whole matrices for each chunk, and one kernel between them.

In half precision the matrix's gradient is summed in float32 over the chunks; of one chunk it is made by one product. So
all tokens are one chunk where their logits take no more room than sums would.
"""

from __future__ import annotations

import torch

from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.chunk_size import chunk_rows
from bowline.functional.loss.chunks.gpu_matmul import GpuProducts
from bowline.functional.loss.chunks.label_gradient import add_own_rows
from bowline.functional.loss.chunks.loss_job import Job, Sweep
from bowline.functional.loss.chunks.softmax import chunk_loss
from bowline.functional.loss.chunks.softmax_formulas import Chunk

__all__ = ["sweep_on_gpu"]


def sweep_on_gpu(job: Job) -> Sweep:
    """The losses, the lse, and the wanted gradients; nothing is waited for."""
    if not len(job.hidden):
        return _nothing(job)
    cast = job.cast()
    hidden, weight, bias, options, wanted = job.hidden, cast.weight, cast.bias, job.options, job.wanted
    right = job.right
    count, size, by = len(hidden), len(weight), GpuProducts()
    sums = job.beside() if wanted.weight else 0
    step = chunk_rows(count, size, weight.dtype, weight.device, job.allowed.scratch(weight), sums)
    ids = job.ids()
    of_hidden = hidden.new_empty(hidden.shape) if wanted.hidden else None  # contiguous, as kernels write
    of_weight = by.sums(job.weight, -(-count // step)) if wanted.weight else None
    of_bias = torch.zeros(size, dtype=job.wide, device=hidden.device) if wanted.bias else None
    room = by.room(min(step, count), weight)
    chunks = []
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        ready, x = by.ready(hidden[part]), room[: part.stop - first]
        by.make_logits(ready, weight, bias, x)
        of_loss = job.of_loss[part] if wanted.any() else None
        of_lse = None if job.of_lse is None else job.of_lse[part]
        chunk = chunk_loss(x, job.labels[part], of_loss, of_lse, options, job.allowed, by_factor=not wanted.bias)
        chunks.append(chunk)
        if of_hidden is not None and chunk.of_label is not None:
            product = by.make_of_hidden(x, weight)
            if job.kernels and kernels_run_on(product) and kernels_run_on(weight):
                add_own_rows(product, weight, ids[part], chunk.of_label, of_hidden[part], chunk.factor)
            else:
                of_hidden[part] = product.add_(weight[ids[part]].to(job.wide) * chunk.of_label[:, None])
        if of_weight is not None:
            some = right[part]
            if chunk.factor is not None:
                some = torch.mul(some, chunk.factor[:, None], out=torch.empty_like(some))
            by.add_of_weight(of_weight, x, by.ready(some), first == 0)
        if of_bias is not None:
            of_bias += x.sum(0, dtype=job.wide)
    del room, x
    all_rows = _joined(chunks)
    if of_weight is not None:
        add_rows(of_weight, ids, right, all_rows.of_label, kernels=job.kernels)
        of_weight = of_weight.to(job.weight.dtype)
    if of_bias is not None and all_rows.of_label is not None:
        of_bias = of_bias.index_add_(0, ids, all_rows.of_label).to(job.weight.dtype)
    return Sweep(losses=all_rows.losses, lse=all_rows.lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)


def _nothing(job: Job) -> Sweep:
    none = job.hidden.new_zeros(0, dtype=job.wide)
    return Sweep(
        losses=none,
        lse=none,
        of_hidden=torch.zeros_like(job.hidden) if job.wanted.hidden else None,
        of_weight=torch.zeros_like(job.weight) if job.wanted.weight else None,
        of_bias=torch.zeros_like(job.weight[:, 0]) if job.wanted.bias else None,
    )


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    own = [chunk.of_label for chunk in chunks if chunk.of_label is not None]
    return Chunk(
        losses=torch.cat([chunk.losses for chunk in chunks]),
        lse=torch.cat([chunk.lse for chunk in chunks]),
        of_label=torch.cat(own) if own else None,
    )
