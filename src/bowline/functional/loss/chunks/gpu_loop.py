"""The chunk loop on a GPU: three products of whole matrices for each chunk, and one kernel between them.

In half precision the matrix's gradient is summed over the chunks in float32; with a single chunk, one product computes
it. So all tokens form one chunk if their logits take no more memory than the sums would.
"""

from __future__ import annotations

import torch

from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss.chunks.chunk_size import chunk_rows
from bowline.functional.loss.chunks.gpu_matmul import GpuProducts
from bowline.functional.loss.chunks.label_gradient import add_label_rows
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult
from bowline.functional.loss.chunks.softmax import chunk_loss
from bowline.functional.loss.chunks.softmax_formulas import Chunk

__all__ = ["run_on_gpu"]


def run_on_gpu(job: LossJob) -> LossResult:
    """The losses, the lse, and the wanted gradients, without waiting for the GPU."""
    if not len(job.hidden):
        return _nothing(job)
    cast = job.cast()
    hidden, weight, bias, options, wanted = job.hidden, cast.weight, cast.bias, job.options, job.wanted
    right = job.right_factor
    count, size, by = len(hidden), len(weight), GpuProducts()
    sums = job.sum_overhead() if wanted.weight else 0
    step = chunk_rows(count, size, weight.dtype, weight.device, job.allowed.scratch(weight), sums)
    ids = job.ids()
    grad_hidden = hidden.new_empty(hidden.shape) if wanted.hidden else None  # contiguous, as kernels write it
    grad_weight = by.sums(job.weight, -(-count // step)) if wanted.weight else None
    grad_bias = torch.zeros(size, dtype=job.wide, device=hidden.device) if wanted.bias else None
    room = by.room(min(step, count), weight)
    terms = job.term_gradients()
    chunks = []
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        ready, x = by.ready(hidden[part]), room[: part.stop - first]
        by.make_logits(ready, weight, bias, x)
        if terms is not None:
            terms.change(x, part)
        grad_loss = job.grad_loss[part] if wanted.any() else None
        grad_lse = None if job.grad_lse is None else job.grad_lse[part]
        by_factor = terms is None and not wanted.bias
        chunk = chunk_loss(x, job.labels[part], grad_loss, grad_lse, options, job.allowed, by_factor=by_factor)
        if terms is not None:
            chunk = terms.take(x, part, ids[part], chunk)
        chunks.append(chunk)
        if grad_hidden is not None and chunk.grad_label is not None:
            product = by.make_grad_hidden(x, weight)
            if job.kernels and kernels_run_on(product) and kernels_run_on(weight):
                add_label_rows(product, weight, ids[part], chunk.grad_label, grad_hidden[part], chunk.factor)
            else:
                grad_hidden[part] = product.add_(weight[ids[part]].to(job.wide) * chunk.grad_label[:, None])
        if grad_weight is not None:
            some = right[part]
            if chunk.factor is not None:
                some = torch.mul(some, chunk.factor[:, None], out=torch.empty_like(some))
            by.add_grad_weight(grad_weight, x, by.ready(some), first == 0)
        if grad_bias is not None:
            grad_bias += x.sum(0, dtype=job.wide)
    del room, x
    all_rows = _joined(chunks)
    if grad_weight is not None:
        add_rows(grad_weight, ids, right, all_rows.grad_label, kernels=job.kernels)
        grad_weight = grad_weight.to(job.weight.dtype)
    if grad_bias is not None and all_rows.grad_label is not None:
        grad_bias = grad_bias.index_add_(0, ids, all_rows.grad_label).to(job.weight.dtype)
    return LossResult(
        losses=all_rows.losses,
        lse=all_rows.lse,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        terms=None if terms is None else terms.found,
    )


def _nothing(job: LossJob) -> LossResult:
    none = job.hidden.new_zeros(0, dtype=job.wide)
    return LossResult(
        losses=none,
        lse=none,
        grad_hidden=torch.zeros_like(job.hidden) if job.wanted.hidden else None,
        grad_weight=torch.zeros_like(job.weight) if job.wanted.weight else None,
        grad_bias=torch.zeros_like(job.weight[:, 0]) if job.wanted.bias else None,
        terms=None if (terms := job.term_gradients()) is None else terms.found,
    )


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    grad_labels = [chunk.grad_label for chunk in chunks if chunk.grad_label is not None]
    return Chunk(
        losses=torch.cat([chunk.losses for chunk in chunks]),
        lse=torch.cat([chunk.lse for chunk in chunks]),
        grad_label=torch.cat(grad_labels) if grad_labels else None,
    )
