"""A model with the names of GPT-2 whose tie the guard's tests break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bowline.tie import Tie

ROWS, WIDTH = 64, 8
BREAKS_AT = 3
TIE = Tie("lm_head.weight", "transformer.wte.weight")


class Tiny(nn.Module):
    """The names of GPT-2, and nothing between its two ends."""

    ties = (TIE,)

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(ROWS, WIDTH), "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        self.lm_head.weight = self.wte.weight

    @property
    def wte(self) -> nn.Embedding:
        return cast(nn.Embedding, self.transformer["wte"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.lm_head(self.transformer["ln_f"](self.wte(tokens))))


def tokens() -> torch.Tensor:
    return torch.randint(ROWS, (2, 6), generator=torch.Generator().manual_seed(0))


def backward(model: Callable[..., torch.Tensor]) -> None:
    torch.autograd.backward(cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()))


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.get_submodule("transformer.wte").weight


def swap_head(model: Any) -> None:
    """What a user writes who wants to change the head, and does not think of the tie."""
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
