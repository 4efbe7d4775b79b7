"""A config of each family, of any size; and the class of each that makes logits."""

from __future__ import annotations

from typing import Any

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

__all__ = ["CLASSES", "configs"]

CLASSES: dict[str, type[Any]] = {
    "bert": BertForMaskedLM,
    "gpt2": GPT2LMHeadModel,
    "t5": T5ForConditionalGeneration,
    "lstm": LSTMLMHeadModel,
}


def configs(vocab_size: int, width: int, layers: int) -> dict[str, Any]:
    """By family, with two heads of attention; the LSTM's table is narrower than its layers."""
    return {
        "bert": BertConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * width,
        ),
        "gpt2": GPT2Config(vocab_size=vocab_size, n_embd=width, n_layer=layers, n_head=2, n_positions=32),
        "t5": T5Config(
            vocab_size=vocab_size, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=layers, num_heads=2
        ),
        "lstm": LSTMConfig(vocab_size=vocab_size, hidden_size=width, embedding_size=3 * width // 4, num_layers=layers),
    }
