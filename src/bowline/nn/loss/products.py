"""The three products of a chunk by one of the libraries at hand: `fastest` says by which.

On some processors oneDNN multiplies float32 faster than what `torch.mm` calls (1.2 to 1.5 times on AMD's), and on some
without bf16 instructions `torch.mm` of bf16 is several times slower than of float32, so that widening both factors,
block by block, is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bowline.nn.loss.chunks import block_rows, padded

__all__ = ["NAMES", "Hidden", "Products", "turned_in"]

NAMES = ("mm", "onednn", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Hidden (n, D) as it is, in float32 where it is widened, and as (D, n) in memory where oneDNN asks for that."""

    plain: torch.Tensor
    wide: torch.Tensor
    turned: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The three products by a library, one of `NAMES`.

    x (n, V), hidden (n, D), weight and its gradient (V, D), which may be float32 where the others are not.
    """

    library: str = "mm"

    @property
    def widens(self) -> bool:
        """Whether every product with the gradient of the logits widens it."""
        return self.library == "float32"

    @property
    def plain(self) -> bool:
        """Whether `torch.mm` makes them, which needs no scratch."""
        return self.library == "mm"

    @property
    def turns(self) -> bool:
        """Whether logits that `make_turned_logits` gives lie turned in memory, too."""
        return self.library != "onednn"

    def room(self, rows: int, weight: torch.Tensor) -> torch.Tensor:
        """For (rows, V) logits, each row aligned."""
        return weight.new_empty(rows, padded(len(weight)))[:, : len(weight)]

    def sums(self, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        """Room for the gradient (V, D), which is the sum of so many products."""
        return torch.empty_like(weight)

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D) in the forms in which it is multiplied, each made once."""
        return Hidden(
            plain=hidden,
            wide=hidden.float() if self.widens else hidden,
            turned=hidden if self.turns else hidden.t().contiguous(),
        )

    def make_logits(
        self, hidden: Hidden, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """hidden weightᵀ + bias into `out` (n, V)."""
        if self.plain:
            return _mm(hidden.plain, weight, bias, out)
        for part in _blocks(weight, len(out)):
            if self.widens:
                block = hidden.wide @ weight[part].float().t()
                out[:, part] = block if bias is None else block.add_(bias[part])
            else:
                out[:, part] = _onednn(hidden.plain, weight[part], None if bias is None else bias[part])
        return out

    def dtype_of_logits(self, hidden: torch.Tensor) -> torch.dtype:
        """Of what `make_turned_logits` gives."""
        return torch.float32 if self.widens else hidden.dtype

    def make_turned_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), of a block of the matrix: in `out`, or a view of what oneDNN made, which is (n, b).

        So oneDNN's are multiplied with the matrix as they lie: it reads its first factor along the rows.
        """
        if not self.turns:
            return _onednn(hidden.plain, weight, None).t()
        if self.widens:
            return torch.mm(weight.float(), hidden.wide.t(), out=out)
        return torch.mm(weight, hidden.plain.t(), out=out)

    def add_of_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32 or wider, += x weight."""
        if self.widens:
            gradient.addmm_(x.float(), weight.float())
        elif not self.plain:
            gradient += _onednn(x, weight.t(), None)
        elif x.dtype == gradient.dtype:
            gradient.addmm_(x, weight)
        else:
            gradient += torch.mm(x, weight)

    def make_of_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.plain:
            return torch.mm(x, weight).to(wide)
        found = torch.zeros(len(x), weight.shape[1], dtype=wide, device=x.device)
        for part in _blocks(weight, len(x)):
            self.add_of_hidden(found, x[:, part], weight[part])
        return found

    def rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """X in the dtype of the matrix, unless every product with it would widen it again."""
        return x if self.widens else x.to(dtype)

    def add_of_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Gradient (V, D) += xᵀ hidden, or = where it is the `first`: block by block, which stay in a cache."""
        for part in _blocks(gradient, len(x)):
            self.add_block_of_weight(gradient[part], x[:, part].t(), hidden, first)

    def add_block_of_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Of a block of the matrix: gradient (b, D) += x hidden, or = where it is the `first`; x (b, n)."""
        if self.plain and gradient.dtype == x.dtype:
            gradient.addmm_(x, hidden.plain, beta=0 if first else 1)
            return
        if self.widens:
            block = x.float() @ hidden.wide
        else:
            block = x @ hidden.plain if self.plain else _onednn(x, hidden.turned, None)
        if first:
            gradient.copy_(block)
            return
        rows = block_rows(gradient.shape[1])  # of another dtype they are widened on the way
        for some, more in zip(gradient.split(rows), block.split(rows), strict=True):
            some += more


def turned_in(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """X (b, n), which may lie as (n, b), in `room` as it is: in halves, for torch turns a whole matrix on one thread.

    For 512 x 2704 numbers that took twice as long (AMD Zen 4, two threads).
    """
    for some, more in zip(room.chunk(2), x.chunk(2), strict=True):
        some.copy_(more)
    return room


def _blocks(weight: torch.Tensor, rows: int) -> list[slice]:
    """Of the vocabulary, so that a block of the matrix is small, and one of `rows` logits."""
    size, step = len(weight), block_rows(max(rows, weight.shape[1]))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _mm(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X weightᵀ + bias, by an operator that is private to torch: it may go, or change what it takes."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
