"""Applies `AdapterTerms` to a chunk of logits, and collects their gradients chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.chunks.softmax_formulas import Chunk

__all__ = ["AdapterGradients", "TermGradients"]

BLOCK = {"cpu": 2**19, "cuda": 2**24}
"""Logits that a thin product touches at once: on a CPU as many as stay in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermGradients:
    """The gradients of left (N, r), right (V, r) and columns (N, k), in float32 or wider; `None` if not wanted."""

    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def first(self, count: int) -> TermGradients:
        """Those of the first rows alone; the gradient of right stays that of all rows."""
        left, columns = (None if one is None else one[:count] for one in (self.left, self.columns))
        return replace(self, left=left, columns=columns)

    def spread(self, rows: torch.Tensor, count: int) -> TermGradients:
        """Those of `count` rows, with 0 for the rows that were left out."""
        left, columns = (
            None if one is None else one.new_zeros(count, one.shape[1]).index_copy_(0, rows, one)
            for one in (self.left, self.columns)
        )
        return replace(self, left=left, columns=columns)


class AdapterGradients:
    """The terms of a chunk loop: changes each chunk's logits x (n, V), and collects the gradients of the terms.

    Products are in the widest dtype of x, left and right; they go over blocks of the vocabulary, so that nothing of
    the size of x is made.
    """

    def __init__(self, terms: AdapterTerms, wanted: tuple[bool, bool, bool], size: int, wide: torch.dtype) -> None:
        self._terms = terms
        left, right, columns = (
            torch.zeros_like(one, dtype=torch.promote_types(one.dtype, wide)) if asked and one is not None else None
            for one, asked in zip((terms.left, terms.right, terms.columns), wanted, strict=True)
        )
        self.found = TermGradients(left=left, right=right, columns=columns)
        self._dtype = wide
        if terms.left is not None and terms.right is not None:
            self._dtype = torch.promote_types(terms.left.dtype, terms.right.dtype)
        if terms.ids is not None:
            self._index = terms.ids.new_full((size,), -1)
            """For each token, its place among the replaced columns, or -1."""
            self._index[terms.ids] = torch.arange(len(terms.ids), device=terms.ids.device)

    def change(self, x: torch.Tensor, part: slice) -> None:
        """Change the logits x (n, V) of the rows `part` in place."""
        ids, columns = self._terms.ids, self._terms.columns
        for block in _blocks(x) if self._terms.right is not None else ():
            self._add_product(x[:, block].t(), block, part)
        if ids is not None and columns is not None:
            x.index_copy_(1, ids, columns[part].to(x.dtype))

    def take(self, x: torch.Tensor, part: slice, labels: torch.Tensor, chunk: Chunk) -> Chunk:
        """Collect from the gradient x (n, V) of the rows `part`, whose label's column is apart in `chunk`.

        Afterwards x and the chunk are the gradient of the head's own product: that of replaced columns is 0.
        labels (n,) are tokens.
        """
        if chunk.grad_label is None:
            return chunk
        ids = self._terms.ids
        if ids is not None:
            if self.found.columns is not None:
                self.found.columns[part] = x.index_select(1, ids).to(self.found.columns.dtype)
            x.index_fill_(1, ids, 0.0)
        for block in _blocks(x) if self._terms.right is not None else ():
            self.add_left(x[:, block].t(), block, part)
            self.add_right(x[:, block].t(), block, part)
        return self.take_labels(part, labels, chunk)

    # --- the same for transposed logits, block by block of the vocabulary --------------------------------------------

    def change_block(self, y: torch.Tensor, block: slice, part: slice) -> None:
        """Change a block of transposed logits, (b, n), in place."""
        if self._terms.right is not None:
            self._add_product(y, block, part)
        if self._terms.columns is not None and len(rows := self._rows_of(block)):
            at = self._index[block][rows]
            y[rows] = self._terms.columns[part][:, at].t().to(y.dtype)

    def restart(self, part: slice) -> None:
        """Forget what was collected of the rows `part` for left and columns."""
        for one in (self.found.left, self.found.columns):
            if one is not None:
                one[part] = 0.0

    def take_columns(self, x: torch.Tensor, block: slice, part: slice) -> None:
        """Move the gradients of replaced columns out of a block (b, n), where 0 is left."""
        if self._terms.columns is not None and len(rows := self._rows_of(block)):
            if self.found.columns is not None:
                taken = x[rows].t().to(self.found.columns.dtype)
                self.found.columns[part] = self.found.columns[part].index_copy(1, self._index[block][rows], taken)
            x[rows] = 0.0

    def add_left(self, x: torch.Tensor, block: slice, part: slice) -> None:
        """Add what a block of the gradient (b, n) gives left."""
        if self.found.left is not None and self._terms.right is not None:
            dtype = torch.promote_types(self._dtype, x.dtype)
            self.found.left[part] += x.t().to(dtype) @ self._terms.right[block].to(dtype)

    def add_right(self, x: torch.Tensor, block: slice, part: slice, factor: torch.Tensor | None = None) -> None:
        """Add what a block of the gradient (b, n), times a factor (n,) of its rows, gives right."""
        if self.found.right is not None and self._terms.left is not None:
            dtype = torch.promote_types(self._dtype, x.dtype)
            left = self._terms.left[part].to(dtype)
            self.found.right[block] += x.to(dtype) @ (left if factor is None else left * factor[:, None])

    def multiply(self, part: slice, factor: torch.Tensor) -> None:
        """Multiply what was collected of the rows `part` for left and columns by a factor (n,)."""
        for one in (self.found.left, self.found.columns):
            if one is not None:
                one[part] *= factor[:, None]

    def take_labels(self, part: slice, labels: torch.Tensor, chunk: Chunk) -> Chunk:
        """Add the columns of the labels, which are apart in `chunk`; 0 is left there where a column was replaced."""
        grad_label = chunk.grad_label
        if grad_label is None:
            return chunk
        if self._terms.columns is not None:
            at = self._index[labels]
            if self.found.columns is not None:
                own = grad_label.masked_fill(at < 0, 0.0).to(self.found.columns.dtype)
                self.found.columns[part].scatter_add_(1, at.clamp(min=0)[:, None], own[:, None])
            grad_label = grad_label.masked_fill(at >= 0, 0.0)
        left, right = self._terms.left, self._terms.right
        if self.found.left is not None and right is not None:
            self.found.left[part] += grad_label[:, None] * right[labels]
        if self.found.right is not None and left is not None:
            rows = (grad_label[:, None] * left[part]).to(self.found.right.dtype)
            self.found.right.index_add_(0, labels, rows)
        return replace(chunk, grad_label=grad_label)

    def _add_product(self, y: torch.Tensor, block: slice, part: slice) -> None:
        """Y (b, n) += right leftᵀ, in the widest of the three dtypes."""
        assert self._terms.left is not None
        assert self._terms.right is not None
        dtype = torch.promote_types(self._dtype, y.dtype)
        left, right = self._terms.left[part].to(dtype), self._terms.right[block].to(dtype)
        if y.dtype == dtype:
            y.addmm_(right, left.t())
        else:
            y += right @ left.t()

    def _rows_of(self, block: slice) -> torch.Tensor:
        """The rows of a block of the vocabulary whose logits are replaced."""
        return (self._index[block] >= 0).nonzero()[:, 0]


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    rows, size = x.shape
    step = max(256, BLOCK.get(x.device.type, BLOCK["cuda"]) // max(1, rows))
    return (slice(first, min(first + step, size)) for first in range(0, size, step))
