"""Tiny tied models of the families, the same every time, whose vocabulary two processes cannot share evenly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["BATCHES", "MODELS", "RATE", "STEPS", "TENSOR_PARALLEL", "VOCABULARY", "built", "trained"]

VOCABULARY = 51
STEPS = 10
RATE = 1e-3


def gpt2() -> nn.Module:
    still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, **still))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **still))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes))


def llama() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, **sizes
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gemma3() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.Gemma3TextConfig(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=8, **sizes)
    model: nn.Module = transformers.Gemma3ForCausalLM(config)
    return model


def transformers_gpt2() -> nn.Module:
    import transformers

    still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, **still, **ends
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def transformers_bert() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))
    return model


def transformers_t5() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, tie_word_embeddings=True, decoder_start_token_id=0)  # type: ignore[call-arg]
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def opt() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        dropout=0.0,
        attention_dropout=0.0,
        word_embed_proj_dim=16,
        max_position_embeddings=16,
        **sizes,
    )
    model: nn.Module = transformers.OPTForCausalLM(config)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "gemma3": gemma3,
}
TENSOR_PARALLEL: Mapping[str, Callable[[], nn.Module]] = {
    **MODELS,
    "transformers gpt2": transformers_gpt2,
    "transformers bert": transformers_bert,
    "transformers t5": transformers_t5,
    "opt": opt,
}
"""Those, and classes of transformers that state no plan."""
_DRAWN = torch.Generator().manual_seed(1)
BATCHES = [torch.randint(1, VOCABULARY, (4, 8), generator=_DRAWN) for _ in range(STEPS)]
"""One batch a step, of four rows: the processes of data parallelism share them out."""


def built(name: str) -> nn.Module:
    """The model, with the same numbers on every process."""
    torch.manual_seed(0)
    return TENSOR_PARALLEL[name]()


def trained(model: Any, optimizer: torch.optim.Optimizer, rows: slice = slice(None)) -> list[torch.Tensor]:
    """The losses of one step for each batch, of these rows of each."""
    losses = []
    for batch in BATCHES:
        loss = model(input_ids=batch[rows], labels=batch[rows]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses
