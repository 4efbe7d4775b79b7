"""What adapters change in the logits of a head: a thin product is added, and the logits of some tokens are replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bowline.errors import UsageError

__all__ = ["AdapterTerms"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdapterTerms:
    """The logits hidden weightᵀ + bias become hidden weightᵀ + bias + left rightᵀ, and `columns` for the tokens `ids`.

    left (..., r) and right (V, r) are what a LoRA of rank r adds: its scaled hidden states, and its matrix of the
    vocabulary. columns (..., k) are the logits of k tokens that have trained rows of their own, ids (k,) of int64, each
    once; they replace what the rest gives. Either pair may be missing.
    """

    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def check(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """Raise `UsageError` unless the shapes fit hidden (..., D) and weight (V, D)."""
        lead, size = tuple(hidden.shape[:-1]), len(weight)
        for name, first, second in (("left", self.left, self.right), ("columns", self.columns, self.ids)):
            if (first is None) != (second is None):
                raise UsageError(
                    f"adapters has one of {name} and its partner: expected left with right, columns with ids"
                )
            if first is not None and tuple(first.shape[:-1]) != lead:
                raise UsageError(
                    f"adapters.{name} {tuple(first.shape)} for hidden {tuple(hidden.shape)}: expected {(*lead, '...')}"
                )
        if self.left is not None and self.right is not None and self.right.shape != (size, self.left.shape[-1]):
            raise UsageError(
                f"adapters.right {tuple(self.right.shape)}: expected {(size, self.left.shape[-1])}, one row a token"
            )
        if self.columns is not None and self.ids is not None and self.ids.shape != self.columns.shape[-1:]:
            raise UsageError(
                f"adapters.ids {tuple(self.ids.shape)}: expected {tuple(self.columns.shape[-1:])}, one a column"
            )

    def over_positions(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AdapterTerms:
        """The terms after `change`, which reshapes or selects positions, of left and columns."""
        if self.left is None and self.columns is None:
            return self
        left, columns = (None if one is None else change(one) for one in (self.left, self.columns))
        return AdapterTerms(left=left, right=self.right, ids=self.ids, columns=columns)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits (..., V), a new tensor, differentiable.

        Example:
            >>> one = torch.ones(1, 1)
            >>> terms = AdapterTerms(left=one, right=torch.ones(3, 1), ids=torch.tensor([2]), columns=7 * one)
            >>> terms.applied(torch.zeros(1, 3))
            tensor([[1., 1., 7.]])
        """
        if self.left is not None and self.right is not None:
            dtype = torch.promote_types(self.left.dtype, self.right.dtype)
            logits = logits + self.left.to(dtype) @ self.right.to(dtype).t()
        if self.ids is not None and self.columns is not None:
            logits = logits.index_copy(-1, self.ids, self.columns.to(logits.dtype))
        return logits
