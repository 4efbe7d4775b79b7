"""Small plain models with a tie to be: a language model, a BERT-like one with a bias tie, an encoder and decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from bowline.nn import tie_weights
from bowline.nn.config.live_config import flag_of, live_configs

__all__ = ["HEAD", "BertLike", "EncoderDecoder", "Flagged", "TinyLM", "backward", "tied"]

ROWS, WIDTH = 11, 4

HEAD = ("head.weight", "emb.weight")


class TinyLM(nn.Module):
    """Embedding, norm, head: `(B, T)` token ids to `(B, T, rows)` logits. Untied until somebody ties it."""

    ties: ClassVar[object] = dict([HEAD])

    def __init__(self, rows: int = ROWS, width: int = WIDTH, *, bias: bool = False, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.emb = nn.Embedding(rows, width)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, rows, bias=bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.norm(self.emb(ids))))


class Flagged(TinyLM):
    """The same with a config of three levels, of which the vision tower's has no words."""

    def __init__(self, flag: bool = True, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__(rows, width)
        text = SimpleNamespace(tie_word_embeddings=flag)
        vision = SimpleNamespace(tie_word_embeddings=False)
        self.config: Any = SimpleNamespace(tie_word_embeddings=flag, text_config=text, vision_config=vision)
        self.config.get_text_config = lambda decoder: text


class BertLike(nn.Module):
    """A decoder whose weight is the embedding's and whose bias is the prediction layer's."""

    ties: ClassVar[object] = {"decoder.weight": "emb.weight", "decoder.bias": "bias"}

    def __init__(self, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.emb = nn.Embedding(rows, width)
            self.transform = nn.Linear(width, width)
            self.decoder = nn.Linear(width, rows)
            self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.decoder(torch.tanh(self.transform(self.emb(ids)))))


class EncoderDecoder(nn.Module):
    """A T5's table: `shared` is the encoder's, the decoder's and the head's."""

    ties: ClassVar[object] = [(name, "shared.weight") for name in ("encoder.weight", "decoder.weight", "head.weight")]

    def __init__(self, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.shared = nn.Embedding(rows, width)
            self.encoder = nn.Embedding(rows, width)
            self.decoder = nn.Embedding(rows, width)
            self.head = nn.Linear(width, rows, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(torch.tanh(self.encoder(ids).mean(1, keepdim=True) + self.decoder(ids))))


def tied(model: TinyLM) -> TinyLM:
    """The model with its head tied, by the one line of plain torch that does it."""
    model.head.weight = model.emb.weight
    return model


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, which torch leaves untyped."""
    torch.autograd.backward(loss)


def flag_levels(model: nn.Module) -> dict[str, bool]:
    """Every level of every live config that states the flag."""
    stated = ((path, flag_of(level)) for path, level in live_configs(model))
    return {path: value for path, value in stated if value is not None}


def seq2seq() -> EncoderDecoder:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    return model


def is_tied(model: TinyLM) -> bool:
    return model.head.weight is model.emb.weight


def linear(weight: torch.Tensor) -> nn.Linear:
    """Another module with a copy of these values."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach().clone())
    return made
