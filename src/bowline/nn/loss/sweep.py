"""One pass over the tokens in chunks: losses, and gradients where they are wanted, without the logits of all tokens.

Beyond the gradients themselves there is a chunk of logits, and blocks that fit in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bowline.nn.loss.chunks import chunk_rows
from bowline.nn.loss.options import Options
from bowline.nn.loss.products import products_for
from bowline.nn.loss.resources import Resources
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
    if skip and hidden.device.type == "cpu":
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
    count, size = len(hidden), len(weight)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses, lse = (torch.zeros(count, dtype=wide, device=hidden.device) for _ in range(2))
    own = torch.zeros_like(lse)  # of the gradient, the column of each row's own label
    ids = labels.masked_fill(labels == options.ignore_index, 0)
    of_hidden = torch.zeros_like(hidden) if wanted.hidden else None
    of_weight = torch.zeros_like(weight) if wanted.weight and not count else None
    if wanted.weight and count:
        of_weight = torch.empty_like(weight)
    of_bias = torch.zeros(size, dtype=wide, device=hidden.device) if wanted.bias else None
    step = chunk_rows(count, size, weight.dtype, weight.device, allowed.scratch(weight.device))
    by = products_for(hidden, weight, allowed)
    room = by.room(min(step, count), weight)
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        some, x = hidden[part], room[: part.stop - part.start]
        by.make_logits(some, weight, bias, x)
        found = chunk_loss(
            x,
            labels[part],
            of_loss[part] if wanted.any() else None,
            None if of_lse is None else of_lse[part],
            options,
            allowed,
        )
        losses[part], lse[part] = found.losses, found.lse
        if found.of_label is None:
            continue
        own[part] = found.of_label
        if of_hidden is not None:
            of_hidden[part] = by.make_of_hidden(x, weight).add_(weight[ids[part]].to(wide) * found.of_label[:, None])
        if of_weight is not None:
            by.add_of_weight(of_weight, x, some, first == 0)
        if of_bias is not None:
            of_bias += x.sum(0, dtype=wide)
    del room
    if of_weight is not None and count:
        add_rows(of_weight, ids, hidden.to(wide) * own[:, None])
    if of_bias is not None and bias is not None:
        of_bias = of_bias.index_add_(0, ids, own).to(bias.dtype)
    return Sweep(losses=losses, lse=lse, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias)
