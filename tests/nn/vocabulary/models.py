"""Small language models, tied and not, whose every number is known to the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

VOCAB = 11
WIDTH = 4


class LM(nn.Module):
    """Embedding, one layer, head; `tied` shares the matrix."""

    def __init__(self, vocab: int = VOCAB, *, tied: bool = True, bias: bool = False, padding_idx: int | None = None):
        super().__init__()
        self.wte = nn.Embedding(vocab, WIDTH, padding_idx=padding_idx)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocab, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.wte(ids))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


class Configured(LM):
    """A model with a config as transformers writes them."""

    def __init__(self, vocab: int = VOCAB, **ids: Any):
        super().__init__(vocab)
        self.config = SimpleNamespace(vocab_size=vocab, tie_word_embeddings=True, **ids)
        self.vocab_size = vocab


def seeded(model: nn.Module, seed: int = 0) -> Any:
    """`model` with its own random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor, copied."""
    return {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether every tensor still has those bits."""
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
