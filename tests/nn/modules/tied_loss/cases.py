"""Tiny models of transformers, one of each way from hidden states to a loss, and a step of one; and a head alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from bowline.functional import shared_gradient
from bowline.functional.deferred import DeferredLogits, Product

__all__ = ["CONFIGS", "IDS", "LABELS", "V", "built", "deferred_of", "ends", "logits_of", "step", "taken"]

V = 50
LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SEQ2SEQ = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "BertForMaskedLM": LAYER,
    "BertForPreTraining": LAYER,
    "RobertaForMaskedLM": LAYER,
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {"d_model": 16, **SEQ2SEQ, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "LlamaForCausalLM": {**LAYER, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {**LAYER, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 16},  # a softcap
    "CohereForCausalLM": LAYER,  # a scale
    "GraniteForCausalLM": {**LAYER, "logits_scaling": 2.0, "tie_word_embeddings": True},  # a division
}
LAYERS = {"n_layer", "num_layers", "num_hidden_layers", "encoder_layers", "decoder_layers"}
IDS = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(0))


def built(name: str, layers: int = 1) -> Any:
    import transformers

    cls = getattr(transformers, name)
    counts = dict.fromkeys(LAYERS & CONFIGS[name].keys(), layers)
    torch.manual_seed(0)
    return cls(cls.config_class(vocab_size=V, **CONFIGS[name] | counts)).double().eval()


def step(model: Any, call: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """The output and every gradient; `call` is what is called for the model."""
    model.zero_grad()
    more = {"next_sentence_label": torch.tensor([0, 1])} if "PreTraining" in type(model).__name__ else {}
    output = (model if call is None else call)(input_ids=IDS, labels=IDS, **more)
    output.loss.backward()
    return output, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def logits_of(output: Any) -> Any:
    return output.prediction_logits if "prediction_logits" in output else output.logits


def taken(model: Any, call: Any = None) -> list[int]:
    """The addresses of the gradients of heads to which lookups' rows were added in a step, none of them a copy."""
    found: list[int] = []
    add: Any = shared_gradient.__dict__["add_rows"]

    def noted(table: torch.Tensor, *args: Any, **more: Any) -> None:
        found.append(table.data_ptr())
        add(table, *args, **more)

    shared_gradient._counts_of_one_owner()  # its rows are no lookup's
    with (
        patch.object(shared_gradient, "add_rows", noted),
        patch.object(shared_gradient, "_copy", side_effect=AssertionError("a head's gradient was copied")),
        patch.object(shared_gradient, "summed_rows", side_effect=AssertionError("no head's gradient had arrived")),
    ):
        step(model, call)
    return found


LABELS = torch.tensor([1, 2, -100, 4, 5, 39])


def ends(seed: int = 0, biased: bool = True) -> list[torch.Tensor]:
    """hidden (6, 4), weight (V, 4) and bias (V,), which gather gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 4), (V, 4), (V,)][: 3 if biased else 2]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def deferred_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **more: Any) -> Any:
    return DeferredLogits(Product(hidden, weight, bias, hidden.dtype, **more))
