"""Processes a chunk of tokens row by row: all logits of the chunk first, then softmax and loss over its rows."""

from __future__ import annotations

import torch

from bowline.functional.loss.chunks.adapter_gradients import AdapterGradients
from bowline.functional.loss.chunks.loss_job import LossJob
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.chunks.softmax import chunk_loss
from bowline.functional.loss.chunks.softmax_formulas import Chunk

__all__ = ["run_row_major"]


def run_row_major(
    job: LossJob,
    by: Products,
    *,
    grad_hidden: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    first: bool,
    room: torch.Tensor,
    ids: torch.Tensor,
    part: slice,
    terms: AdapterGradients | None,
) -> Chunk:
    """The losses of hidden (n, D), and the products with the gradient of their logits, which lie in `room` (n, V).

    `grad_weight` (V, D) is overwritten by the `first` chunk and added to by the others. `grad_hidden` (n, D), of zeros,
    and `grad_bias` (V,), in float32 or wider, are added to. `ids` (n,) are the labels as tokens; `terms` changes the
    logits of these rows, which are the rows `part` of all.
    """
    ready, x = by.ready(job.hidden), room[: len(job.hidden)]
    by.make_logits(ready, job.weight, job.bias, x)
    if terms is not None:
        terms.change(x, part)
    grad_loss = job.grad_loss if job.wanted.any() else None
    chunk = chunk_loss(x, job.labels, grad_loss, job.grad_lse, job.options, job.allowed)
    if terms is not None:
        chunk = terms.take(x, part, ids, chunk)
    if grad_hidden is not None:
        grad_hidden += by.make_grad_hidden(x, job.weight)
    if grad_weight is not None:
        by.add_grad_weight(grad_weight, x, ready if job.shrink is None else by.ready(job.right_factor), first)
    if grad_bias is not None:
        grad_bias += x.sum(0, dtype=job.wide)
    return chunk
