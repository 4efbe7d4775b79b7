"""Small tied models with random weights, and inputs of any size for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LSTMConfig,
    LSTMLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["MODELS", "Plain", "bert", "gpt2", "llama_directory", "lstm", "one_copy", "t5", "tokens"]

ROWS = 30_000
"""Enough that the matrix, and not the graph, decides the size of a file."""


def gpt2(rows: int = ROWS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_embd=64, n_layer=1, n_head=2, n_positions=32))


def bert(rows: int = ROWS) -> BertForMaskedLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    }
    return BertForMaskedLM(BertConfig(vocab_size=rows, hidden_size=64, **sizes))


def t5(rows: int = ROWS) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=rows, **sizes))


def lstm(rows: int = ROWS) -> LSTMLMHeadModel:
    torch.manual_seed(0)
    return LSTMLMHeadModel(LSTMConfig(vocab_size=rows, hidden_size=48, embedding_size=64))


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "lstm": lstm}


class Plain(nn.Module):
    """A model without a config, whose head is its embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(900, 16)
        self.lm_head = nn.Linear(16, 900, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(torch.tanh(self.wte(ids)))
        return logits


def llama_directory(place: Path) -> Path:
    """A tied Llama of transformers, which Bowline has no class for, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is True
    return place


def tokens(model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Ids and a mask with padding at the end of the first row; for T5 a longer target."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - length // 4 :] = 0
    inputs = {"input_ids": torch.randint(ROWS, (batch, length), generator=generator), "attention_mask": mask}
    if isinstance(model, T5ForConditionalGeneration):
        inputs["decoder_input_ids"] = torch.randint(ROWS, (batch, length + 3), generator=generator)
    return inputs


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own, in evaluation mode."""
    with torch.no_grad():
        made: torch.Tensor = model.eval()(**inputs).logits
    return made


def one_copy(model: nn.Module) -> int:
    """Bytes of the parameters, each counted once."""
    return sum(one.numel() * one.element_size() for one in model.parameters())
