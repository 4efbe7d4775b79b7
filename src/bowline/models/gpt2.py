"""GPT-2 (Radford et al., 2019): a pre-norm decoder whose head is its embedding.

The tie: `lm_head.weight` is `transformer.wte.weight`, one `Parameter`. So `named_parameters()` lists it once, as wte's;
`lm_head` is no parameter of its own, and tuning the head tunes the embedding. logits = h wteᵀ: the logit of token i is
h . e_i. Both ends add to one gradient: the head all rows, through the softmax, the embedding those that were looked up.

From the paper: learned positions, LayerNorm before each part and after the last block, residual projections drawn
smaller by sqrt(2 layers). Matrices are stored as OpenAI had them, (in, out): `Conv1D`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.models.causal_lm import CausalLM
from bowline.models.common.blocks import (
    activation,
    attend,
    check_beside,
    check_embeds,
    check_ids,
    looked_up,
    packed_mask,
    prune_linear,
    split_heads,
    visible_keys,
)
from bowline.models.common.kv_cache import KVCache, check_cache
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["GPT2Config", "GPT2LMHeadModel", "GPT2Model"]


@frozen
class GPT2Config(PreTrainedConfig):
    """GPT-2 small, unless other values are given."""

    model_type = "gpt2"
    attribute_map: ClassVar = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("n_positions")
        self.check_depth("n_layer")
        self.check_flags("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
        self.check_heads("n_embd", "n_head")
        if self.n_inner is not None:
            self.check_sizes("n_inner")
        self.check_numbers("resid_pdrop", "embd_pdrop", "attn_pdrop", high=1.0)
        self.check_numbers("layer_norm_epsilon", "initializer_range")


class Conv1D(nn.Module):
    """x weight + bias, with weight (in, out): `nn.Linear` transposed."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class GPT2Attention(nn.Module):
    """Causal self-attention, its three projections in one product."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.n_head
        self.head_size = config.n_embd // config.n_head
        self.scale = self.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.dropout = config.attn_pdrop
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: KVCache | None) -> torch.Tensor:
        query, key, value = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, -1))  # (B, H, T, d)
        if cache is not None:
            key, value = cache.update(self.layer, key, value)
        dropout = self.dropout if self.training else 0.0
        causal = query.shape[2] == key.shape[2]
        mixed = attend(query, key, value, mask, causal=causal, dropout=dropout, scale=self.scale)
        return self.resid_dropout(self.c_proj(mixed))  # (B, T, D)

    def prune(self, heads: list[int]) -> None:
        """Without these heads, counted as they are now."""
        keep = [at for head in range(self.heads) if head not in heads for at in _columns(head, self.head_size)]
        index = torch.tensor(keep, device=self.c_proj.weight.device)
        width = self.heads * self.head_size
        three = torch.cat([index, index + width, index + 2 * width])
        self.c_attn.weight = prune_linear(self.c_attn.weight, three, 1)
        self.c_attn.bias = prune_linear(self.c_attn.bias, three, 0)
        self.c_proj.weight = prune_linear(self.c_proj.weight, index, 0)
        self.heads -= len(heads)


def _columns(head: int, size: int) -> range:
    return range(head * size, (head + 1) * size)


class GPT2MLP(nn.Module):
    """D to 4 D and back."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        self.act = activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: KVCache | None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT2PreTrainedModel(PreTrainedModel):
    """What both classes have: the config, the names, the draws."""

    config_class = GPT2Config
    base_model_prefix = "transformer"
    _keys_to_ignore_on_load_unexpected = (r"\.attn\.(masked_)?bias$",)  # masks, which old files hold

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Conv1D):
            module.weight.normal_(std=std)
            module.bias.zero_()
        elif isinstance(module, (GPT2Attention, GPT2MLP)):
            module.c_proj.weight.normal_(std=std / math.sqrt(2 * self.config.n_layer))


class GPT2Model(GPT2PreTrainedModel):
    """Tokens (B, T) to their hidden states (B, T, D)."""

    input_embeddings = "wte"

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.wte = TiedEmbedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseOutput:
        """`attention_mask` as `blocks.visible_keys` has it; positions that begin anew within a row tell packed
        sequences apart, where no mask is given.

        Raises:
            UsageError: ids, positions or a mask that do not fit.
        """
        if (input_ids is None) is (inputs_embeds is None):
            raise UsageError("input_ids and inputs_embeds: expected one of them")
        if inputs_embeds is None:
            check_ids(input_ids, self.config.vocab_size)  # type: ignore[arg-type]
            inputs_embeds = looked_up(self.wte, input_ids, self.config.embed_scale)  # type: ignore[arg-type]
        check_embeds(inputs_embeds, self.config.n_embd)
        batch, length = inputs_embeds.shape[:2]
        if past_key_values is not None:
            check_cache(past_key_values, batch)
        past = len(past_key_values) if past_key_values is not None else 0
        if position_ids is None:
            if past + length > self.config.n_positions:
                raise UsageError(
                    f"{past + length} positions, and the table has {self.config.n_positions} (n_positions)",
                    help="cut the text, or build a model with more positions",
                )
            position_ids = torch.arange(past, past + length, device=inputs_embeds.device)[None]
        else:
            check_beside(position_ids, batch, length, self.config.n_positions, "position_ids")
            if attention_mask is None and not past:
                attention_mask = packed_mask(position_ids)
        x = inputs_embeds + self.wpe(position_ids)
        if token_type_ids is not None:  # they are looked up in the table of words, as in OpenAI's fine-tuning
            check_beside(token_type_ids, batch, length, self.config.vocab_size, "token_type_ids")
            x = x + looked_up(self.wte, token_type_ids, self.config.embed_scale)
        x = self.drop(x)  # (B, T, D)
        cache = past_key_values if past_key_values is not None else KVCache(len(self.h)) if use_cache else None
        mask = visible_keys(attention_mask, batch, length, past + length, causal=True, device=x.device)
        states = [x]
        for block in self.h:
            x = self._run(block, x, mask, cache)
            if output_hidden_states:
                states.append(x)
        x = self.ln_f(x)
        states[-1] = x
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseOutput(last_hidden_state=x, past_key_values=cache, hidden_states=hidden_states)

    def _prune(self, heads: Mapping[int, list[int]]) -> None:
        for layer, some in heads.items():
            attention = self.h[layer].attn
            attention.prune(some)  # type: ignore[operator, union-attr]


class GPT2LMHeadModel(GPT2PreTrainedModel, CausalLM):
    """GPT-2 with its head: logits (B, T, V), and the loss of each next token where there are `labels`."""

    ties: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    input_embeddings = "transformer.wte"
    uses_position_ids = True

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.lm_head = LMHead(config.n_embd, config.vocab_size, bias=False)
        self.post_init()
