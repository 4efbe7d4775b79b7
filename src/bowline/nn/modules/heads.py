"""Output heads: `LMHead`, whose matrix stays shared in an ONNX export, and BERT's `MLMHead`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

__all__ = ["LMHead", "MLMHead"]

Activation = Callable[[torch.Tensor], torch.Tensor]


class LMHead(nn.Linear):
    """`nn.Linear` on rows: `(..., in_features)` to `(..., out_features)` by one product of two matrices.

    For a product with three axes, ONNX export makes a `Transpose` and a `MatMul`, and onnxruntime stores the transposed
    matrix beside the embedding's. For a product of two matrices it makes a `Gemm` with `transB=1`, which reads the
    embedding's matrix. Names, values and gradients are those of `nn.Linear`.

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


class MLMHead(nn.Module):
    """logits = decoder(transform(hidden)) + bias, as BERT predicts tokens: (..., D) to (..., V).

    transform(h) = LayerNorm(activation(dense h)). `decoder.weight` is there to be tied to the embedding, and
    `decoder.bias` to `bias`, the output-only bias: one parameter for each of the two under two names. Untied, a
    checkpoint holds both biases and only the decoder's acts. Names are those of transformers' `cls.predictions`.

    Args:
        hidden_size: D.
        vocab_size: V.
        activation: between the dense layer and the LayerNorm.
        eps: of the LayerNorm.

    Example:
        >>> head = MLMHead(4, 9)
        >>> head(torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 9])
        >>> [name for name, _ in head.named_parameters()][-3:]
        ['transform.LayerNorm.bias', 'decoder.weight', 'decoder.bias']
    """

    def __init__(self, hidden_size: int, vocab_size: int, activation: Activation = F.gelu, eps: float = 1e-12) -> None:
        super().__init__()
        self.transform = MLMTransform(hidden_size, activation, eps)
        self.decoder = LMHead(hidden_size, vocab_size)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(self.transform(hidden))
        return logits


class MLMTransform(nn.Module):
    """LayerNorm(activation(dense h)): (..., D) to (..., D)."""

    def __init__(self, hidden_size: int, activation: Activation, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = activation
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.activation(self.dense(hidden)))
        return normed
