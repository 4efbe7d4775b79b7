"""The three products of a chunk, each by one of the libraries at hand: `fastest` says by which.

On some processors oneDNN multiplies float32 faster than what `torch.mm` calls (1.4 times on AMD Zen 5), and on some
without bf16 instructions `torch.mm` of bf16 is several times slower than of float32, so that widening both factors,
block by block, is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bowline.nn.loss.chunks import block_rows, padded

__all__ = ["NAMES", "Hidden", "Products"]

NAMES = ("mm", "onednn", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Hidden (n, D) as it is, in float32 where it is widened, and as (D, n) in memory where oneDNN asks for that."""

    plain: torch.Tensor
    wide: torch.Tensor
    turned: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """For each of the three products the name of its library, one of `NAMES`.

    x (n, V), hidden (n, D), weight and its gradient (V, D), which may be float32 where the others are not.
    """

    logits: str = "mm"
    of_hidden: str = "mm"
    of_weight: str = "mm"

    @property
    def widens(self) -> bool:
        """Whether every product with the gradient of the logits widens it."""
        return self.of_hidden == self.of_weight == "float32"

    @property
    def plain(self) -> bool:
        """Whether `torch.mm` makes all of them, which needs no scratch."""
        return self.logits == self.of_hidden == self.of_weight == "mm"

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
            wide=hidden.float() if "float32" in (self.logits, self.of_weight) else hidden,
            turned=hidden.t().contiguous() if self.of_weight == "onednn" else hidden,
        )

    def make_logits(
        self, hidden: Hidden, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """hidden weightᵀ + bias into `out` (n, V)."""
        if self.logits == "mm":
            return _mm(hidden.plain, weight, bias, out)
        for part in _blocks(weight, len(out)):
            if self.logits == "onednn":
                out[:, part] = _onednn(hidden.plain, weight[part], None if bias is None else bias[part])
            else:
                block = hidden.wide @ weight[part].float().t()
                out[:, part] = block if bias is None else block.add_(bias[part])
        return out

    def dtype_of_logits(self, hidden: torch.Tensor) -> torch.dtype:
        """In which `make_turned_logits` writes."""
        return torch.float32 if self.logits == "float32" else hidden.dtype

    def make_turned_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (V, n), into `out`; weight is a block of the matrix."""
        if self.logits == "onednn":
            return out.copy_(_onednn(weight, hidden.plain, None))
        if self.logits == "float32":
            return torch.mm(weight.float(), hidden.wide.t(), out=out)
        return torch.mm(weight, hidden.plain.t(), out=out)

    def add_of_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32 or wider, += x weight."""
        if self.of_hidden == "mm" and x.dtype == gradient.dtype:
            gradient.addmm_(x, weight)
        elif self.of_hidden == "mm":
            gradient += torch.mm(x, weight)
        elif self.of_hidden == "onednn":
            gradient += _onednn(x.contiguous(), weight.t(), None)
        else:
            gradient.addmm_(x.float(), weight.float())

    def make_of_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.of_hidden == "mm":
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
        if self.of_weight == "mm" and gradient.dtype == x.dtype:
            gradient.addmm_(x, hidden.plain, beta=0 if first else 1)
            return
        if self.of_weight == "onednn":
            block = _onednn(x, hidden.turned, None)
        else:
            block = x @ hidden.plain if self.of_weight == "mm" else x.float() @ hidden.wide
        if first:
            gradient.copy_(block)
            return
        rows = block_rows(gradient.shape[1])  # of another dtype they are widened on the way
        for some, more in zip(gradient.split(rows), block.split(rows), strict=True):
            some += more


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
