"""T5's stack, which is its encoder and its decoder: blocks that add a bias of each distance to their scores.

RMSNorm without a mean or bias before each part; scores are not divided by sqrt(d). What is added to the scores, the
bias of each distance's bucket and the masks, is made once, and is one tensor for all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.models.blocks import activation, attend, check_ids, looked_up, split_heads, visible_keys
from bowline.models.cache import KVCache, check_cache
from bowline.models.outputs import BaseOutput

if TYPE_CHECKING:
    from bowline.models.t5 import T5Config

__all__ = ["T5Attention", "T5Dense", "T5LayerNorm", "T5Stack"]


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps), (..., 1), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


class _Normed(torch.autograd.Function):
    """The norm on a CPU, where torch has no fused one: x alone is kept for the backward pass, which is twice as fast.

    The backward pass is made of differentiable parts, so second derivatives are right too.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * _inverse(x, eps) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        inverse = _inverse(x, ctx.eps)
        normed, scaled = x * inverse, grads[0] * weight
        along = torch.linalg.vecdot(scaled, normed)[..., None] / x.shape[-1]
        return (scaled - normed * along) * inverse, (grads[0] * normed).flatten(0, -2).sum(0), None


class T5LayerNorm(nn.Module):
    """weight x / sqrt(mean(x²) + eps)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        plain = x.dtype is self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if plain and not traced and not torch.is_grad_enabled():  # nothing to keep: the fewest calls
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if plain and not traced:
            return _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return self.weight * (x * _inverse(x, self.eps)).to(self.weight.dtype)


class T5Attention(nn.Module):
    """softmax(q kᵀ + bias) v. The first of a stack has the table of the biases, (buckets, heads)."""

    def __init__(self, config: T5Config, layer: int, *, relative: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_heads
        self.dropout = config.dropout_rate
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if relative:
            self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None, cache: KVCache | None
    ) -> torch.Tensor:
        """`memory`: what is attended to in place of x itself, the encoder's output; its keys are computed once."""
        if memory is not None and cache is not None and self.layer in cache.fixed:
            key, value = cache.fixed[self.layer]
        else:
            source = x if memory is None else memory
            key, value = split_heads(self.k(source), self.heads), split_heads(self.v(source), self.heads)
            if cache is not None and memory is not None:
                key, value = cache.fixed[self.layer] = key.contiguous(), value.contiguous()  # read at every step
            elif cache is not None:
                key, value = cache.update(self.layer, key, value)
        query = split_heads(self.q(x), self.heads)  # (B, H, Q, d)
        return self.o(attend(query, key, value, bias, dropout=self.dropout if self.training else 0.0, scale=1.0))


def bucket(distance: torch.Tensor, buckets: int, farthest: int, *, both_ways: bool) -> torch.Tensor:
    """The bucket of each distance, key minus query: one for each near one, then logarithmically wider to `farthest`.

    With `both_ways` one half of the buckets is for what comes before and one for what comes after; otherwise what comes
    after is in bucket 0, and is masked.
    """
    after = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        after = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    near = buckets // 2
    steps = torch.log(distance.clamp(min=1).float() / near) / math.log(farthest / near) * (buckets - near)
    far = (near + steps.long()).clamp(max=buckets - 1)
    return after + torch.where(distance < near, distance, far)


class T5Dense(nn.Module):
    """act(x wi) wo, or gated: (act(x wi_0) (x wi_1)) wo."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.gated = config.is_gated_act
        if self.gated:
            self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
            self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        else:
            self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = activation(config.dense_act_fn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.wi_0(x)) * self.wi_1(x) if self.gated else self.act(self.wi(x))
        return self.wo(self.dropout(inner))


class T5Layer(nn.Module):
    """x + dropout(part(norm(x))), where the part hangs under the name that checkpoints give it."""

    def __init__(self, config: T5Config, name: str, part: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, part)
        self.layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
        x = x + self.dropout(getattr(self, self.name)(self.layer_norm(x), *inputs))
        if x.dtype == torch.float16:  # a sum past its range must not become inf, and then NaN in the next norm
            most = torch.finfo(x.dtype).max
            limit = torch.where(x.isinf().any(), most - 1000, most)
            x = x.clamp(-limit, limit)
        return x


class T5Block(nn.Module):
    """Self-attention, the decoder's attention to the encoder's output, and the feed-forward part."""

    def __init__(self, config: T5Config, layer: int, *, decoder: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList()
        self.layer.append(T5Layer(config, "SelfAttention", T5Attention(config, layer, relative=layer == 0)))
        if decoder:
            self.layer.append(T5Layer(config, "EncDecAttention", T5Attention(config, layer, relative=False)))
        self.layer.append(T5Layer(config, "DenseReluDense", T5Dense(config)))

    def forward(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        memory: torch.Tensor | None,
        memory_bias: torch.Tensor | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        x = self.layer[0](x, bias, None, cache)
        if memory is not None:
            x = self.layer[1](x, memory_bias, memory, cache)
        return self.layer[-1](x)


def _call(block: Callable[..., Any], *inputs: Any) -> Any:
    return block(*inputs)


class T5Stack(nn.Module):
    """The encoder, or the decoder. `embed_tokens` is the model's `shared`."""

    def __init__(self, config: T5Config, embed_tokens: nn.Embedding, layers: int, *, decoder: bool) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        self.farthest = config.relative_attention_max_distance
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(T5Block(config, layer, decoder=decoder) for layer in range(layers))
        self.final_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        output_hidden_states: bool = False,
        run: Callable[..., Any] = _call,
    ) -> BaseOutput:
        """Tokens (B, T) to (B, T, D); `run` calls a block with its inputs."""
        check_ids(input_ids, self.embed_tokens.num_embeddings, "decoder_input_ids" if self.decoder else "input_ids")
        if cache is not None:
            check_cache(cache, len(input_ids))
        x = self.dropout(looked_up(self.embed_tokens, input_ids, self.config.embed_scale))  # (B, T, D)
        bias = self._bias(x, attention_mask, len(cache) if cache is not None else 0)
        memory_bias = _memory_bias(x, memory, memory_mask)
        states = [x]
        for block in self.block:
            x = run(block, x, bias, memory, memory_bias, cache)
            if output_hidden_states:
                states.append(x)
        x = self.dropout(self.final_layer_norm(x))
        states[-1] = x
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseOutput(last_hidden_state=x, past_key_values=cache, hidden_states=hidden_states)

    def _bias(self, x: torch.Tensor, mask: torch.Tensor | None, past: int) -> torch.Tensor:
        """What every block adds to its scores, (B or 1, H, Q, K): each distance's bias, or the least number there is.

        Not -inf: a query that sees nothing (padding on the left) gives a mean, as in transformers, and never NaN.
        """
        batch, length = x.shape[:2]
        seen = visible_keys(mask, batch, length, past + length, causal=False, device=x.device)
        keys = torch.arange(past + length, device=x.device)
        distance = keys - keys[past:, None]  # (Q, K)
        table = self.block[0].layer[0].SelfAttention.relative_attention_bias  # type: ignore[index, union-attr]
        rows = bucket(distance, table.num_embeddings, self.farthest, both_ways=not self.decoder)
        bias = table(rows).permute(2, 0, 1)[None].to(_dtype(x)).contiguous()
        if self.decoder and length > 1:
            seen = distance <= 0 if seen is None else seen & (distance <= 0)
        return bias if seen is None else torch.where(seen, bias, torch.finfo(bias.dtype).min)


def _memory_bias(x: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """What the decoder adds to its scores of the encoder's positions, (B, 1, 1 or Q, K): 0 or the least number."""
    if memory is None:
        return None
    batch, length = x.shape[:2]
    if memory.shape[0] != batch:
        raise UsageError(
            f"the encoder has a batch of {memory.shape[0]} and the decoder of {batch}: expected a source for each row"
        )
    seen = visible_keys(mask, batch, length, memory.shape[1], causal=False, device=x.device)
    if seen is None:
        return None
    return x.new_zeros((), dtype=_dtype(x)).where(seen, torch.finfo(_dtype(x)).min)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """In which attention computes: a mask must have it, and its least number is not another dtype's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
