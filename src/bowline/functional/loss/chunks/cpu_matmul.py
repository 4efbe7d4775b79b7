"""The three products on a CPU: by oneDNN, or in float32 for half precision; `matmul_choice` picks the fastest.

On some processors oneDNN multiplies float32 faster than the library that `torch.mm` calls (1.2 to 1.5 times on AMD's).
On some without bf16 instructions, `torch.mm` is several times slower for bf16 than for float32, so that widening both
factors block by block pays off.
"""

from __future__ import annotations

import torch

from bowline.functional.loss.chunks.matmul import Hidden, Products, add_block, blocks

__all__ = ["LIBRARIES", "OneDnn", "Widened", "keep_freed_blocks", "contiguous_in"]


class _InBlocks(Products):
    """Products over the whole vocabulary, computed block by block."""

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

    def make_grad_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        found = torch.zeros(len(x), weight.shape[1], dtype=wide, device=x.device)
        for part in blocks(weight, len(x)):
            self.add_grad_hidden(found, x[:, part], weight[part])
        return found


class Widened(_InBlocks):
    """Half-precision products, computed in float32 by `torch.mm`."""

    widens = True

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D) in float32."""
        return super().ready(hidden.float())

    def logits_dtype(self, hidden: torch.Tensor) -> torch.dtype:
        """The dtype of the result of `make_transposed_logits`."""
        return torch.float32

    def make_transposed_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), for a block of the matrix, in `out`."""
        return super().make_transposed_logits(hidden, weight.float(), out)

    def add_grad_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32, += x weight."""
        gradient.addmm_(x.float(), weight.float())

    def add_block_grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """For a block of the matrix: gradient (b, D) += x hidden, or = for the `first` chunk; x (b, n)."""
        super().add_block_grad_weight(gradient, x.float(), hidden, first)

    def _logits(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        return hidden.plain @ weight.float().t()


class OneDnn(_InBlocks):
    """Float32 products by oneDNN, which reads its first factor along the rows and allocates its result."""

    transposes = False

    def ready(self, hidden: torch.Tensor) -> Hidden:
        """Hidden (n, D), and a copy that lies as (D, n) in memory."""
        return Hidden(plain=hidden, transposed=hidden.t().contiguous())

    def make_transposed_logits(self, hidden: Hidden, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weight hiddenᵀ, (b, n), for a block of the matrix: a view of (n, b), the layout of the next product."""
        return self._logits(hidden, weight).t()

    def add_grad_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D) += x weight."""
        gradient += _onednn(x, weight.t())

    def add_block_grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """For a block of the matrix: gradient (b, D) += x hidden, or = for the `first` chunk; x (b, n)."""
        add_block(gradient, _onednn(x, hidden.transposed), first)

    def _logits(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        return _onednn(hidden.plain, weight)


LARGEST = 2**25 - 2**17
"""Bytes of the largest freed block that raises glibc's threshold for mapping memory."""

LIBRARIES = {"mm": Products(), "onednn": OneDnn(), "float32": Widened()}


def keep_freed_blocks() -> None:
    """Frees one large, untouched block, so that glibc from then on keeps the memory of oneDNN's results.

    glibc adapts to it: smaller blocks then come from its heap, at whose end twice as much may stay free. Without this,
    each product is written into newly mapped memory: 97,000 small pages in a step with V 128256, D 1024 and 1024
    tokens, instead of 1,000. Other allocators ignore it.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")


def contiguous_in(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """X (b, n), which may lie as (n, b), copied into the contiguous `room`, in two halves.

    torch transposes a whole matrix on one thread: for 512 x 2704 numbers that took twice as long (AMD Zen 4, two
    threads).
    """
    for some, more in zip(room.chunk(2), x.chunk(2), strict=True):
        some.copy_(more)
    return room


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X weightᵀ, by a private operator of torch, which may disappear or change its arguments."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found
