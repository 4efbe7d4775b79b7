"""The output head: a Linear whose one matrix stays one when it is exported."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LMHead"]


class LMHead(nn.Linear):
    """`nn.Linear` on rows: `(..., in_features)` to `(..., out_features)` by one product of two matrices.

    Of a product of three axes ONNX makes a `Transpose` and a `MatMul`, and onnxruntime stores the transposed matrix
    beside the one in which the embedding looks up. Of a product of two it makes a `Gemm` with `transB=1`, which reads
    the embedding's own. Names, values and gradients are those of `nn.Linear`.

    Example:
        >>> head = LMHead(4, 9, bias=False)
        >>> hidden = torch.ones(2, 3, 4)
        >>> head(hidden).shape
        torch.Size([2, 3, 9])
        >>> torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
        True
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.ndim <= 2:
            return super().forward(hidden)
        logits = super().forward(hidden.flatten(0, -2))
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])
