"""`TiedEmbedding`: an embedding whose table is also an output head."""

from __future__ import annotations

import torch
from torch import nn

from bowline.functional.tied_lookup import tied_embedding

__all__ = ["TiedEmbedding"]


class TiedEmbedding(nn.Embedding):
    """`nn.Embedding` with `tied_embedding` as its lookup, for a table that is also an output head; same names.

    Example:
        >>> table = TiedEmbedding(9, 4)
        >>> torch.equal(table(torch.tensor([3, 5])), table.weight[[3, 5]])
        True
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch gives it
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return tied_embedding(input, self.weight, self.padding_idx)
