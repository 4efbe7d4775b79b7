"""The three matrix products of a chunk, by `torch.mm`; `cpu_matmul` and `gpu_matmul` have other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bowline.functional.loss.chunks.chunk_size import block_rows, padded

__all__ = ["Hidden", "Products", "add_block", "blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Hidden (n, D) in the form to multiply, and, for a library that needs it, as (D, n) in memory."""

    plain: torch.Tensor
    transposed: torch.Tensor


class Products:
    """x (n, V), hidden (n, D), weight and its gradient (V, D), which may be float32 where the others are not.

    Attributes:
        in_blocks: whether products write into temporary blocks instead of their destination.
        transposes: whether the result of `make_transposed_logits` is transposed in memory, too.
        widens: whether every product with the gradient of the logits widens it.
    """

    in_blocks: ClassVar[bool] = False
    transposes: ClassVar[bool] = True
    widens: ClassVar[bool] = False

    def room(self, rows: int, weight: torch.Tensor) -> torch.Tensor:
        """An empty buffer for (rows, V) logits, each row aligned."""
        return weight.new_empty(rows, padded(len(weight)))[:, : len(weight)]

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D) in the forms that the products need, each made once."""
        return Hidden(plain=hidden, transposed=hidden)

    def make_logits(
        self, hidden: Hidden, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """hidden weightᵀ + bias into `out` (n, V)."""
        if bias is None:
            return torch.mm(hidden.plain, weight.t(), out=out)
        return torch.addmm(bias, hidden.plain, weight.t(), out=out)

    def logits_dtype(self, hidden: torch.Tensor) -> torch.dtype:
        """The dtype of the result of `make_transposed_logits`."""
        return hidden.dtype

    def make_transposed_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), for a block of the matrix, in `out`; in new memory if `transposes` is False."""
        return torch.mm(weight, hidden.plain.t(), out=out)

    def add_grad_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32 or wider, += x weight."""
        if x.dtype == gradient.dtype:
            gradient.addmm_(x, weight)
        else:
            gradient += torch.mm(x, weight)

    def make_grad_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider."""
        return torch.mm(x, weight).to(torch.promote_types(x.dtype, torch.float32))

    def rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """X in the given dtype, unless every product with it would widen it again."""
        return x if self.widens else x.to(dtype)

    def add_grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Gradient (V, D) += xᵀ hidden, or = for the `first` chunk, in blocks that stay in a cache."""
        for part in blocks(gradient, len(x)):
            self.add_block_grad_weight(gradient[part], x[:, part].t(), hidden, first)

    def add_block_grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """For a block of the matrix: gradient (b, D) += x hidden, or = for the `first` chunk; x (b, n)."""
        if gradient.dtype == x.dtype:
            gradient.addmm_(x, hidden.plain, beta=0 if first else 1)
        else:
            add_block(gradient, x @ hidden.plain, first)


def blocks(weight: torch.Tensor, rows: int) -> list[slice]:
    """Slices of the vocabulary, small enough for the cache in the matrix and in `rows` rows of logits."""
    size, step = len(weight), block_rows(max(rows, weight.shape[1]))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def add_block(gradient: torch.Tensor, block: torch.Tensor, first: bool) -> None:
    """Gradient += block, or = for the `first` chunk; some rows at a time, as rows of another dtype are widened."""
    if first:
        gradient.copy_(block)
        return
    rows = block_rows(gradient.shape[1])
    for some, more in zip(gradient.split(rows), block.split(rows), strict=True):
        some += more
