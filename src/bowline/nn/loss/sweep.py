"""One pass over the tokens in chunks: losses, and gradients where they are wanted, without the logits of all tokens.

Where the matrix's gradient is wanted, the first chunk's logits lie in the buffer of that gradient. Beyond the gradients
themselves there is, for what is left, a chunk of logits, and blocks that fit in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bowline.nn.loss.chunks import chunk_rows
from bowline.nn.loss.fastest import products_for
from bowline.nn.loss.gpu_products import GpuProducts
from bowline.nn.loss.in_place import fits_in_place, sweep_in_place
from bowline.nn.loss.options import Options
from bowline.nn.loss.resources import Resources
from bowline.nn.loss.rule import Chunk
from bowline.nn.loss.softmax import chunk_loss
from bowline.nn.tied_embedding import add_rows

__all__ = ["Sweep", "Wanted", "sweep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which gradients."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Losses (N,) and lse (N,) in float32 or wider, and the wanted gradients, in the dtypes of what they are of.

    Where rows without a label were skipped, the lse of those is 0.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    of_hidden: torch.Tensor | None = None
    of_weight: torch.Tensor | None = None
    of_bias: torch.Tensor | None = None


def sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
    allowed: Resources,
    *,
    wanted: Wanted,
    of_loss: torch.Tensor,
    of_lse: torch.Tensor | None = None,
    skip: bool = False,
) -> Sweep:
    """The loss of each row of hidden (N, D) with label (N,), and the gradients for `of_loss` (N,) and `of_lse` (N,).

    `skip`: rows without a label are left out, and so is what they hold, infinities included.
    """
    if skip and _may_wait(hidden.device):
        rows = (labels != options.ignore_index).nonzero()[:, 0]
        if len(rows) < len(labels):
            some = sweep(
                hidden[rows],
                weight,
                bias,
                labels[rows],
                options,
                allowed,
                wanted=wanted,
                of_loss=of_loss[rows],
                of_lse=None if of_lse is None else of_lse[rows],
            )
            return _spread(some, rows, len(labels))
    return _sweep(hidden, weight, bias, labels, options, allowed, wanted, of_loss, of_lse)


def _may_wait(device: torch.device) -> bool:
    """For how many rows have a label: once, which costs a GPU's queue less than rows without one would."""
    return device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


def _spread(some: Sweep, rows: torch.Tensor, count: int) -> Sweep:
    """0 for the rows that were left out."""
    losses, lse = (one.new_zeros(count).index_copy_(0, rows, one) for one in (some.losses, some.lse))
    of_hidden = some.of_hidden
    if of_hidden is not None:
        of_hidden = of_hidden.new_zeros(count, of_hidden.shape[1]).index_copy_(0, rows, of_hidden)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=some.of_weight, of_bias=some.of_bias)


@torch.no_grad()
def _sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
    allowed: Resources,
    wanted: Wanted,
    of_loss: torch.Tensor,
    of_lse: torch.Tensor | None,
) -> Sweep:
    count, (size, width) = len(hidden), weight.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses, lse, own = (torch.zeros(count, dtype=wide, device=hidden.device) for _ in range(3))
    ids = labels.masked_fill(labels == options.ignore_index, 0)
    of_hidden = torch.zeros_like(hidden) if wanted.hidden else None
    of_bias = torch.zeros(size, dtype=wide, device=hidden.device) if wanted.bias else None
    by = products_for(hidden, weight, allowed) if weight.device.type == "cpu" else GpuProducts()
    scratch = allowed.scratch(weight.device)
    step, done = chunk_rows(count, size, weight.dtype, weight.device, scratch), 0
    of_weight = None
    if wanted.weight:
        of_weight = by.sums(weight, -(-count // step)) if count else torch.zeros_like(weight)

    def keep(part: slice, found: Chunk, product: torch.Tensor | None) -> None:
        """`product`: of the gradient of hidden, what is not the column of each row's label, which is `own`."""
        losses[part], lse[part] = found.losses, found.lse
        if found.of_label is not None:
            own[part] = found.of_label
        if of_hidden is not None and product is not None:
            of_hidden[part] = product.add_(weight[ids[part]].to(wide) * own[part, None])

    if of_weight is not None and fits_in_place(options, weight.device) and min(count, width) >= step:
        part = slice(done := min(count, width))
        product = torch.zeros(done, width, dtype=wide) if wanted.hidden else None
        chunk = sweep_in_place(
            hidden[part],
            weight,
            bias,
            labels[part],
            options,
            by,
            of_loss=of_loss[part],
            of_lse=None if of_lse is None else of_lse[part],
            of_weight=of_weight,
            of_hidden=product,
            of_bias=of_bias,
        )
        keep(part, chunk, product)
        step = chunk_rows(count - done, size, weight.dtype, weight.device, scratch)
    room = by.room(min(step, count - done), weight)
    for first in range(done, count, step):
        part = slice(first, min(first + step, count))
        ready, x = by.ready(hidden[part]), room[: part.stop - part.start]
        by.make_logits(ready, weight, bias, x)
        chunk = chunk_loss(
            x,
            labels[part],
            of_loss[part] if wanted.any() else None,
            None if of_lse is None else of_lse[part],
            options,
            allowed,
        )
        keep(part, chunk, by.make_of_hidden(x, weight) if wanted.hidden else None)
        if of_weight is not None:
            by.add_of_weight(of_weight, x, ready, first == 0)
        if of_bias is not None:
            of_bias += x.sum(0, dtype=wide)
    del room
    if of_weight is not None and count:
        add_rows(of_weight, ids, hidden.to(wide) * own[:, None])
        of_weight = of_weight.to(weight.dtype)
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)
