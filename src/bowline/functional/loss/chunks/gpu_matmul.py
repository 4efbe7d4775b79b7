"""The three products on a GPU: whole matrices, which its library splits into blocks itself, summed in float32."""

from __future__ import annotations

import torch

from bowline.functional.loss.chunks.matmul import Hidden, Products

__all__ = ["GpuProducts"]


class GpuProducts(Products):
    """`torch.mm` and `addmm`; in half precision the gradient of the matrix is rounded once, not in each chunk."""

    def sums(self, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        """An empty, contiguous buffer for the gradient (V, D): in float32 or wider, unless one product computes it."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        return weight.new_empty(weight.shape, dtype=weight.dtype if chunks == 1 else wide)

    def make_grad_hidden(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """X weight: (n, D), in float32 or wider; not rounded in between if this torch can avoid it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.dtype != wide and _widens(x.device):
            return torch.mm(x, weight, out_dtype=wide)
        return torch.mm(x, weight).to(wide)

    def add_grad_hidden(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Gradient (n, D), in float32 or wider, += x weight; not rounded in between if this torch can avoid it."""
        if gradient.dtype == x.dtype:
            gradient.addmm_(x, weight)
        elif _widens(x.device):
            torch.addmm(gradient, x, weight, out_dtype=gradient.dtype, out=gradient)
        else:
            gradient += torch.mm(x, weight)

    def add_grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, hidden: Hidden, first: bool) -> None:
        """Gradient (V, D) += xᵀ hidden, or = for the `first` chunk."""
        if gradient.dtype == x.dtype:
            gradient.addmm_(x.t(), hidden.plain, beta=0 if first else 1)
        elif not _widens(x.device):
            block = torch.mm(x.t(), hidden.plain)
            gradient.copy_(block) if first else gradient.add_(block)
        elif first:
            torch.mm(x.t(), hidden.plain, out_dtype=gradient.dtype, out=gradient)
        else:
            torch.addmm(gradient, x.t(), hidden.plain, out_dtype=gradient.dtype, out=gradient)


def _widens(device: torch.device) -> bool:
    """Whether half-precision factors can give a float32 product: from torch 2.8 and compute capability 8.0 on."""
    there = hasattr(torch.ops.aten.addmm, "dtype_out")
    return there and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))
