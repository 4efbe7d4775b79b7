"""Tiny tied models, the same every time, whose vocabulary two processes cannot share evenly.

They are in float64, and their weights five times those of a start: so attention matters, and a difference from one
process is a fault and not rounding, which ten steps of Adam enlarge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from bowline import models

__all__ = ["BATCHES", "FAMILIES", "MODELS", "RATE", "STEPS", "TENSOR_PARALLEL", "VOCABULARY", "built", "trained"]

VOCABULARY = 51
STEPS = 10
RATE = 1e-3
GPT2: Mapping[str, Any] = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
WIDTHS: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BERT: Mapping[str, Any] = {**WIDTHS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: Mapping[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
LLAMA: Mapping[str, Any] = {**WIDTHS, "num_key_value_heads": 2, "pad_token_id": 0}
ONE_HEAD: Mapping[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
OPT: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "word_embed_proj_dim": 16,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def gpt2(**sizes: Any) -> nn.Module:
    return models.GPT2LMHeadModel(models.GPT2Config(**{"vocab_size": VOCABULARY, **GPT2, **sizes}))


def bert(**sizes: Any) -> nn.Module:
    return models.BertForMaskedLM(models.BertConfig(**{"vocab_size": VOCABULARY, **BERT, **sizes}))


def t5(**sizes: Any) -> nn.Module:
    return models.T5ForConditionalGeneration(models.T5Config(**{"vocab_size": VOCABULARY, **T5, **sizes}))


def of_transformers(model: str, config: str, **sizes: Any) -> nn.Module:
    """A model of transformers by the names of its class and its config's."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCABULARY, **sizes))
    return made


FAMILIES: Mapping[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "bert": bert, "t5": t5}
"""Bowline's own, which take other sizes."""
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **FAMILIES,
    "llama": partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **LLAMA),
    "gemma3": partial(of_transformers, "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, **LLAMA),
}
TENSOR_PARALLEL: Mapping[str, Callable[[], nn.Module]] = {
    **MODELS,
    "transformers gpt2": partial(
        of_transformers, "GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0, **GPT2
    ),
    "transformers bert": partial(of_transformers, "BertForMaskedLM", "BertConfig", **BERT),
    "transformers t5": partial(
        of_transformers,
        "T5ForConditionalGeneration",
        "T5Config",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        **T5,
    ),
    "llama with one head": partial(
        of_transformers, "LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **{**LLAMA, **ONE_HEAD}
    ),
    "opt": partial(of_transformers, "OPTForCausalLM", "OPTConfig", **OPT),
}
"""Those, classes of transformers that state no plan, and a model whose one head two processes cannot share."""
_DRAWN = torch.Generator().manual_seed(1)
BATCHES = [torch.randint(1, VOCABULARY, (4, 8), generator=_DRAWN) for _ in range(STEPS)]
"""One batch a step, of four rows: the processes of data parallelism share them out."""


def built(name: str) -> nn.Module:
    """The model, with the same numbers on every process."""
    torch.manual_seed(0)
    model = TENSOR_PARALLEL[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


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
