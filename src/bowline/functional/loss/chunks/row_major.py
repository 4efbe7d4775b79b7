"""A chunk of tokens whose logits are all made before what is between the products, which goes over rows of them."""

from __future__ import annotations

import torch

from bowline.functional.loss.chunks.loss_job import Job
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.chunks.softmax import chunk_loss
from bowline.functional.loss.chunks.softmax_formulas import Chunk

__all__ = ["sweep_rows"]


def sweep_rows(
    job: Job,
    by: Products,
    *,
    of_hidden: torch.Tensor | None,
    of_weight: torch.Tensor | None,
    of_bias: torch.Tensor | None,
    first: bool,
    room: torch.Tensor,
) -> Chunk:
    """The losses of hidden (n, D), and the products with the gradient of their logits, which lie in `room` (n, V).

    Where it is the `first` chunk, `of_weight` (V, D), whatever is in it, is made, else added to; `of_hidden` (n, D), of
    zeros, and `of_bias` (V,), in float32 or wider, are added to.
    """
    ready, x = by.ready(job.hidden), room[: len(job.hidden)]
    by.make_logits(ready, job.weight, job.bias, x)
    of_loss = job.of_loss if job.wanted.any() else None
    chunk = chunk_loss(x, job.labels, of_loss, job.of_lse, job.options, job.allowed)
    if of_hidden is not None:
        of_hidden += by.make_of_hidden(x, job.weight)
    if of_weight is not None:
        by.add_of_weight(of_weight, x, ready if job.shrink is None else by.ready(job.right), first)
    if of_bias is not None:
        of_bias += x.sum(0, dtype=job.wide)
    return chunk
