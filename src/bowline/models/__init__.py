"""BERT, GPT-2, T5 and the tied LSTM: complete, compact, with transformers' names and tensors."""

from __future__ import annotations

from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model

__all__ = [
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPT2Model",
]
