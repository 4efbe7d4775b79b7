"""On a CPU: the three products by oneDNN, or of what is widened to float32; `fastest` says by which.

On some processors oneDNN multiplies float32 faster than what `torch.mm` calls (1.2 to 1.5 times on AMD's), and on some
without bf16 instructions `torch.mm` of bf16 is several times slower than of float32, so that widening both factors,
block by block, is worth it.
"""

from __future__ import annotations

import torch

from bowline.functional.loss.chunks.matmul import Hidden, Products, add_block, blocks

__all__ = ["LIBRARIES", "OneDnn", "Widened", "keep_freed_blocks", "turned_in"]


class _InBlocks(Products):
    """Of the whole vocabulary, block by block."""

    in_blocks = True

    def make_logits(
        self, hidden: Hidden, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """hidden weightᵀ + bias into `out` (n, V)."""
        for part in blocks(weight, len(out)):
            block = self._logits(hidden, weight[part])
            out[:, part] = block if bias is None else block.add_(bias[part])
        return out

    def _logits(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def make_of_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        found = torch.zeros(len(x), weight.shape[1], dtype=wide, device=x.device)
        for part in blocks(weight, len(x)):
            self.add_of_hidden(found, x[:, part], weight[part])
        return found


class Widened(_InBlocks):
    """Half precision in float32, by `torch.mm`."""

    widens = True

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D) in float32."""
        return super().ready(hidden.float())

    def dtype_of_logits(self, hidden: torch.Tensor) -> torch.dtype:
        """Of what `make_turned_logits` gives."""
        return torch.float32

    def make_turned_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), of a block of the matrix, in `out`."""
        return super().make_turned_logits(hidden, weight.float(), out)

    def add_of_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32, += x weight."""
        gradient.addmm_(x.float(), weight.float())

    def add_block_of_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Of a block of the matrix: gradient (b, D) += x hidden, or = where it is the `first`; x (b, n)."""
        super().add_block_of_weight(gradient, x.float(), hidden, first)

    def _logits(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        return hidden.plain @ weight.float().t()


class OneDnn(_InBlocks):
    """Of float32, by oneDNN, which reads its first factor along the rows and writes into memory of its own."""

    turns = False

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D), and (D, n) in memory."""
        return Hidden(plain=hidden, turned=hidden.t().contiguous())

    def make_turned_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), of a block of the matrix: a view of (n, b), which so can be multiplied with it."""
        return self._logits(hidden, weight).t()

    def add_of_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D) += x weight."""
        gradient += _onednn(x, weight.t())

    def add_block_of_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Of a block of the matrix: gradient (b, D) += x hidden, or = where it is the `first`; x (b, n)."""
        add_block(gradient, _onednn(x, hidden.turned), first)

    def _logits(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        return _onednn(hidden.plain, weight)


LARGEST = 2**25 - 2**17
"""Bytes: of a larger block glibc learns nothing."""

LIBRARIES = {"mm": Products(), "onednn": OneDnn(), "float32": Widened()}


def keep_freed_blocks() -> None:
    """Gives glibc a large block back once, untouched, so that from then on it keeps what oneDNN's results lie in.

    It learns from such a block: smaller ones come from its heap, at whose end twice as much may lie free. Else each
    product is written into memory that has to be mapped anew: 97,000 small pages in a step of V 128256, D 1024 and 1024
    tokens, and then 1,000. Other allocators take no notice.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")


def turned_in(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """X (b, n), which may lie as (n, b), in `room` as it is: in halves, for torch turns a whole matrix on one thread.

    For 512 x 2704 numbers that took twice as long (AMD Zen 4, two threads).
    """
    for some, more in zip(room.chunk(2), x.chunk(2), strict=True):
        some.copy_(more)
    return room


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X weightᵀ, by an operator that is private to torch: it may go, or change what it takes."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found
