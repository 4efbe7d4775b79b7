"""Tiny random models of every class that is exported to GGUF, with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.export.gguf_tokenizers import TOKENIZERS

__all__ = ["BUILT", "MODELS", "ROWS", "TOKENIZER", "made", "tokenizer_of"]

BUILT = {name: build() for name, build in TOKENIZERS.items()}
TOKENIZER = BUILT["byte-level"]


def rows_for(tokenizer: str) -> int:
    """Rows for a tokenizer of that name, with three that no token has."""
    return int(tokenizers.Tokenizer.from_str(BUILT[tokenizer]).get_vocab_size()) + 3


ROWS = rows_for("byte-level")
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


def _gemma(version: str, **options: Any) -> Any:
    sizes = {**SIZES, "vocab_size": rows_for("Gemma"), "head_dim": 32, "num_hidden_layers": 3, "eos_token_id": 1}
    sizes |= {"bos_token_id": 1, "pad_token_id": 0}
    if version != "":
        sizes |= {"query_pre_attn_scalar": 32, "sliding_window": 8}
    model: Any = getattr(transformers, f"Gemma{version}ForCausalLM")
    config: Any = getattr(transformers, {"3": "Gemma3TextConfig"}.get(version, f"Gemma{version}Config"))
    return model(config(**{**sizes, **options}))


def _t5(name: str = "T5", tokenizer: str = "T5", **options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": rows_for(tokenizer), "d_model": 48, "d_kv": 16, "d_ff": 96}
    sizes |= {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    return model(getattr(transformers, f"{name}Config")(**{**sizes, **options}))


def _gpt2(**options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": ROWS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def _untied(model: Any) -> Any:
    """A T5 with a head of its own, as version 1.1 is published: the config of transformers 5 always says tied."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


MODELS: Mapping[str, Callable[[], Any]] = {
    "Llama, tied": lambda: _llama(tie_word_embeddings=True),
    "Llama, untied": lambda: _llama(tie_word_embeddings=False),
    "Llama 3's frequencies": lambda: _llama(tie_word_embeddings=True, rope_parameters=LLAMA_3),
    "Llama with biases, tied": lambda: _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Llama with scaled rotations, tied": lambda: _llama(
        tie_word_embeddings=True, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    ),
    "Mistral, untied": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None)
    ),
    "Qwen 2, tied": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "Qwen 3, tied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
    ),
    "GPT-2, tied": _gpt2,
    "GPT-2, untied": lambda: _gpt2(tie_word_embeddings=False),
    "Llama 2, tied": lambda: _llama(vocab_size=rows_for("Llama 2"), tie_word_embeddings=True),
    "Llama 2 in transformers 5, untied": lambda: _llama(
        vocab_size=rows_for("Llama 2 in transformers 5"), tie_word_embeddings=False
    ),
    "Gemma, tied": lambda: _gemma(""),
    "Gemma 2, tied": lambda: _gemma("2"),
    "Gemma 3, tied": lambda: _gemma("3"),
    "Gemma 3, untied": lambda: _gemma("3", tie_word_embeddings=False),
    "Gemma 3, other layers with a window": lambda: _gemma(
        "3", layer_types=["full_attention", "sliding_attention", "full_attention"], final_logit_softcapping=5.0
    ),
    "Gemma 3, scaled rotations": lambda: _gemma(
        "3",
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "T5, tied and scaled": _t5,
    "T5, tied": lambda: _t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu", num_decoder_layers=1),
    "T5 with words, tied and scaled": lambda: _t5(tokenizer="Unigram of words", d_model=64),
    "mT5, untied": lambda: _untied(_t5("MT5", feed_forward_proj="gated-gelu")),
    "T5 1.1, untied": lambda: _untied(_t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu")),
}


def tokenizer_of(name: str) -> str:
    """The `tokenizer.json` of a model."""
    if name.startswith(("T5 with words",)):
        return BUILT["Unigram of words"]
    longest = max((one for one in BUILT if name.startswith(one)), key=len, default="byte-level")
    return BUILT["T5" if name.startswith("mT5") else longest]


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
    (place / "tokenizer.json").write_text(tokenizer_of(name))
    return model
