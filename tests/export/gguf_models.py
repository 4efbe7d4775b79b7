"""Tiny random models of every class that is exported to GGUF, with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.edit.tokenizer.small_tokenizers import byte_level

__all__ = ["MODELS", "TOKENIZER", "made"]

TOKENIZER = byte_level()
ROWS = tokenizers.Tokenizer.from_str(TOKENIZER).get_vocab_size() + 3  # with rows that no token has
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **options}))


def _gpt2(**options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": ROWS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


MODELS: Mapping[str, Callable[[], Any]] = {
    "Llama, tied": lambda: _llama(tie_word_embeddings=True),
    "Llama, untied": lambda: _llama(tie_word_embeddings=False),
    "Llama 3's frequencies": lambda: _llama(tie_word_embeddings=True, rope_parameters=LLAMA_3),
    "Mistral, untied": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None)
    ),
    "Qwen 2, tied": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "Qwen 3, tied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
    ),
    "GPT-2, tied": _gpt2,
    "GPT-2, untied": lambda: _gpt2(tie_word_embeddings=False),
}


def made(name: str, place: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of that name, saved at `place` with its tokenizer."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = MODELS[name]().to(dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(place)
    (place / "tokenizer.json").write_text(TOKENIZER)
    return model
