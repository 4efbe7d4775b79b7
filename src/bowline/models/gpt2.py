"""GPT-2 (Radford et al., 2019): a pre-norm decoder whose head is its embedding.

The tie: `lm_head.weight` is `transformer.wte.weight`, one `Parameter`. `named_parameters()` therefore lists it once, as
wte's. `lm_head` has no parameter of its own, and tuning the head tunes the embedding. logits = h wteᵀ: the logit of
token i is h . e_i. Head and embedding add to one gradient: the head to all rows, through the softmax, the embedding to
the rows that were looked up.

From the paper: learned positions, LayerNorm before each part and after the last block, residual projections drawn
smaller by sqrt(2 layers). Matrices are stored as OpenAI stored them, (in, out): see `Conv1D`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from bowline.models.causal_lm import CausalLM
from bowline.models.common.activation_functions import activation
from bowline.models.common.attention import attend, packed_mask, prune_linear, split_heads, visible_keys
from bowline.models.common.input_checks import check_beside
from bowline.models.common.input_embeddings import looked_up, token_embeddings, token_positions
from bowline.models.common.kv_cache import KVCache, check_cache
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["GPT2Config", "GPT2LMHeadModel", "GPT2Model"]


@frozen
class GPT2Config(PreTrainedConfig):
    """The configuration of GPT-2. The defaults are those of GPT-2 small."""

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
    """A linear layer x weight + bias, whose weight is stored as (in, out): `nn.Linear` transposed."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class GPT2Attention(nn.Module):
    """Causal self-attention; query, key and value come from one matrix product."""

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
        """Remove these heads, numbered among the heads that are left now."""
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
    """The feed-forward part: D to `n_inner` (4 D by default) and back."""

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
    """One pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

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
    """The base of both GPT-2 classes: config class, names in checkpoints, initialization."""

    config_class = GPT2Config
    base_model_prefix = "transformer"
    _keys_to_ignore_on_load_unexpected = (r"\.attn\.(masked_)?bias$",)  # old files hold the causal masks

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Conv1D):
            module.weight.normal_(std=std)
            module.bias.zero_()
        elif isinstance(module, (GPT2Attention, GPT2MLP)):
            module.c_proj.weight.normal_(std=std / math.sqrt(2 * self.config.n_layer))


class GPT2Model(GPT2PreTrainedModel):
    """GPT-2 without a head: tokens (B, T) to hidden states (B, T, D)."""

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
        """`attention_mask` is as `attention.visible_keys` takes it.

        If no mask is given, positions that begin anew within a row separate packed sequences.

        Raises:
            UsageError: ids, positions or a mask that do not fit.
        """
        embeds = self._embed(input_ids, inputs_embeds)  # (B, T, D)
        cache, past = self._cache(past_key_values, len(embeds), use_cache)
        positions = token_positions(position_ids, embeds, past=past, size=self.config.n_positions, key="n_positions")
        if position_ids is not None and attention_mask is None and not past:
            attention_mask = packed_mask(positions)
        x = embeds + self.wpe(positions)
        if token_type_ids is not None:
            x = x + self._embed_types(token_type_ids, *embeds.shape[:2])
        x = self.drop(x)  # (B, T, D)
        batch, length = x.shape[:2]
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

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        return token_embeddings(
            self.wte,
            input_ids,
            inputs_embeds,
            vocab_size=self.config.vocab_size,
            width=self.config.n_embd,
            scale=self.config.embed_scale,
        )

    def _cache(self, given: KVCache | None, batch: int, use_cache: bool) -> tuple[KVCache | None, int]:
        """Return the cache to fill, and the number of tokens that it holds already."""
        if given is None:
            return KVCache(len(self.h)) if use_cache else None, 0
        check_cache(given, batch)
        return given, len(given)

    def _embed_types(self, token_type_ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """Look token types up in the table of words, as OpenAI's fine-tuning did."""
        check_beside(token_type_ids, batch, length, self.config.vocab_size, "token_type_ids")
        return looked_up(self.wte, token_type_ids, self.config.embed_scale)

    def _prune(self, heads: Mapping[int, list[int]]) -> None:
        for layer, some in heads.items():
            attention = self.h[layer].attn
            attention.prune(some)  # type: ignore[operator, union-attr]


class GPT2LMHeadModel(GPT2PreTrainedModel, CausalLM):
    """GPT-2 with its head: logits (B, T, V), and the next-token loss if `labels` are given."""

    ties: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    input_embeddings = "transformer.wte"
    uses_position_ids = True

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.lm_head = LMHead(config.n_embd, config.vocab_size, bias=False)
        self.post_init()
