"""What a sweep is given, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources

__all__ = ["Job", "Sweep", "Wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which gradients."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, slots=True)
class Job:
    """hidden (N, D), weight (V, D), bias (V,) or `None`, labels (N,), and what comes back for each loss and lse, (N,).

    Products are made in the dtype of hidden. A float32 matrix beside hidden in half precision, as under autocast, is
    cast for them, and its gradient is summed in float32.

    `wanted`: which gradients. `shrink`: what that of the matrix is to be multiplied by, a number, or `None` for 1.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    options: Options
    allowed: Resources
    wanted: Wanted
    of_loss: torch.Tensor
    of_lse: torch.Tensor | None = None
    shrink: torch.Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def right(self) -> torch.Tensor:
        """What the gradient of the logits is multiplied with for that of the matrix: hidden, shrunk."""
        return self.hidden if self.shrink is None else self.hidden * self.shrink

    @property
    def kernels(self) -> bool:
        """Whether Triton's kernels are allowed."""
        return self.allowed.compiler

    def ids(self) -> torch.Tensor:
        """The labels, and 0 where there is none."""
        if self.options.ignore_index < 0 and self.labels.device.type != "cpu":
            return self.labels.clamp(min=0)  # one kernel
        return self.labels.masked_fill(self.labels == self.options.ignore_index, 0)

    def beside(self) -> int:
        """Bytes that sums of the matrix's gradient in float32 or wider take more than the gradient."""
        return self.weight.numel() * self.wide.itemsize - self.weight.nbytes

    def cast(self) -> Job:
        """With the whole matrix and the bias in the dtype of the products."""
        dtype = self.hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def padded(self, multiple: int) -> Job:
        """With rows of zeros that have no label, so that their number is a multiple."""
        more = -len(self.hidden) % multiple
        return replace(
            self,
            hidden=F.pad(self.hidden, (0, 0, 0, more)),
            labels=F.pad(self.labels, (0, more), value=self.options.ignore_index),
            of_loss=F.pad(self.of_loss, (0, more)),
            of_lse=None if self.of_lse is None else F.pad(self.of_lse, (0, more)),
        )

    def of(self, rows: torch.Tensor | slice) -> Job:
        """Some rows."""
        return replace(
            self,
            hidden=self.hidden[rows],
            labels=self.labels[rows],
            of_loss=self.of_loss[rows],
            of_lse=None if self.of_lse is None else self.of_lse[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Losses (N,) and lse (N,) in float32 or wider, and the wanted gradients, in the dtypes of what they are of.

    Where rows without a label may be skipped, the lse of those says nothing.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    of_hidden: torch.Tensor | None = None
    of_weight: torch.Tensor | None = None
    of_bias: torch.Tensor | None = None

    def first(self, count: int) -> Sweep:
        """Of the first rows alone; the gradients of matrix and bias are those of all."""
        of_hidden = None if self.of_hidden is None else self.of_hidden[:count]
        return replace(self, losses=self.losses[:count], lse=self.lse[:count], of_hidden=of_hidden)

    def spread(self, rows: torch.Tensor, count: int) -> Sweep:
        """Of `count` rows, 0 for those that were left out."""
        losses, lse = (one.new_zeros(count).index_copy_(0, rows, one) for one in (self.losses, self.lse))
        of_hidden = self.of_hidden
        if of_hidden is not None:
            of_hidden = of_hidden.new_zeros(count, of_hidden.shape[1]).index_copy_(0, rows, of_hidden)
        return replace(self, losses=losses, lse=lse, of_hidden=of_hidden)
