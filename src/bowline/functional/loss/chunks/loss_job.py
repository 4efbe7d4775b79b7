"""The input of a chunk loop, its result, and which gradients are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.chunks.adapter_gradients import AdapterGradients, TermGradients
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources

__all__ = ["LossJob", "LossResult", "Wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    terms: tuple[bool, bool, bool] = (False, False, False)
    """Those of the adapters' left, right and columns."""

    def any(self) -> bool:
        return self.hidden or self.weight or self.bias or any(self.terms)


@dataclass(frozen=True, slots=True)
class LossJob:
    """hidden (N, D), weight (V, D), bias (V,) or `None`, labels (N,), and the gradients of each loss and lse, (N,).

    Products are computed in the dtype of hidden. If hidden is in half precision and the matrix in float32, as under
    autocast, the matrix is cast for them and its gradient is summed in float32.

    `wanted`: which gradients to compute. `shrink`: a factor for the matrix's gradient, or `None` for 1. `adapters`:
    what adapters change in the logits, by rows of (N, r) and (N, k).
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    options: Options
    allowed: Resources
    wanted: Wanted
    grad_loss: torch.Tensor
    grad_lse: torch.Tensor | None = None
    shrink: torch.Tensor | None = None
    adapters: AdapterTerms | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def right_factor(self) -> torch.Tensor:
        """The right factor of the product that gives the matrix's gradient: hidden times `shrink`."""
        return self.hidden if self.shrink is None else self.hidden * self.shrink

    @property
    def kernels(self) -> bool:
        """Whether Triton kernels are allowed."""
        return self.allowed.compiler

    def scratch(self) -> int:
        """The budget in bytes; by default an adapter on a frozen matrix, which has no gradient, has a quarter of it."""
        found = self.allowed.scratch(self.weight)
        frozen = self.wanted.terms[1] and not self.wanted.weight and self.weight.device.type == "cpu"
        return max(found, self.weight.nbytes // 4) if frozen and self.allowed.budget is None else found

    def ids(self) -> torch.Tensor:
        """The labels, with 0 in place of `ignore_index`."""
        if self.options.ignore_index < 0 and self.labels.device.type != "cpu":
            return self.labels.clamp(min=0)  # one kernel
        return self.labels.masked_fill(self.labels == self.options.ignore_index, 0)

    def sum_overhead(self) -> int:
        """Bytes by which a sum in float32 or wider is larger than the matrix's gradient."""
        return self.weight.numel() * self.wide.itemsize - self.weight.nbytes

    def cast(self) -> LossJob:
        """A copy with the whole matrix and the bias in the dtype of the products."""
        dtype = self.hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def padded(self, multiple: int) -> LossJob:
        """A copy with rows of zeros without a label appended, so that the number of rows is a multiple."""
        more = -len(self.hidden) % multiple
        return replace(
            self,
            hidden=F.pad(self.hidden, (0, 0, 0, more)),
            labels=F.pad(self.labels, (0, more), value=self.options.ignore_index),
            grad_loss=F.pad(self.grad_loss, (0, more)),
            grad_lse=None if self.grad_lse is None else F.pad(self.grad_lse, (0, more)),
            adapters=self.adapters and self.adapters.over_positions(lambda one: F.pad(one, (0, 0, 0, more))),
        )

    def term_gradients(self) -> AdapterGradients | None:
        """What changes the logits of this job's chunks and collects gradients there; `None` without adapters."""
        if self.adapters is None:
            return None
        return AdapterGradients(self.adapters, self.wanted.terms, len(self.weight), self.wide)

    def of(self, rows: torch.Tensor | slice) -> LossJob:
        """The job for some of the rows."""
        return replace(
            self,
            hidden=self.hidden[rows],
            labels=self.labels[rows],
            grad_loss=self.grad_loss[rows],
            grad_lse=None if self.grad_lse is None else self.grad_lse[rows],
            adapters=self.adapters and self.adapters.over_positions(lambda one: one[rows]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Losses (N,) and lse (N,) in float32 or wider, and the wanted gradients, each in the dtype of its tensor.

    If rows without a label may be skipped, their lse has no meaning.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    grad_hidden: torch.Tensor | None = None
    grad_weight: torch.Tensor | None = None
    grad_bias: torch.Tensor | None = None
    terms: TermGradients | None = None

    def first(self, count: int) -> LossResult:
        """The result for the first rows alone; the gradients of matrix and bias stay those of all rows."""
        grad_hidden = None if self.grad_hidden is None else self.grad_hidden[:count]
        terms = self.terms and self.terms.first(count)
        return replace(self, losses=self.losses[:count], lse=self.lse[:count], grad_hidden=grad_hidden, terms=terms)

    def spread(self, rows: torch.Tensor, count: int) -> LossResult:
        """The result for `count` rows, with 0 for the rows that were left out."""
        losses, lse = (one.new_zeros(count).index_copy_(0, rows, one) for one in (self.losses, self.lse))
        grad_hidden = self.grad_hidden
        if grad_hidden is not None:
            grad_hidden = grad_hidden.new_zeros(count, grad_hidden.shape[1]).index_copy_(0, rows, grad_hidden)
        terms = self.terms and self.terms.spread(rows, count)
        return replace(self, losses=losses, lse=lse, grad_hidden=grad_hidden, terms=terms)
