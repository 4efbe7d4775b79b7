"""T5 (Raffel et al., 2020): an encoder and a decoder with one table, and a scale that belongs to the tie.

The tie: `shared` is one module, which encoder and decoder both hold as `embed_tokens`. The head differs by version:

    v1.0   lm_head.weight is shared.weight   logits = d_model^-1/2 h sharedᵀ   tied and scaled
    v1.1   a head of its own                 logits = h lm_headᵀ               untied, gated, unscaled

Why the scale goes with the tie: the table is drawn with std 1, so a row has norm sqrt(d_model), and so has h after the
last norm. Unscaled, tied logits have std sqrt(d_model): at d_model = 512 the first loss is about 161, not ln V = 10.9.
The config has a key for each: `tie_word_embeddings` and `scale_decoder_outputs`. Files of transformers 4 have only the
first, which decides both. transformers 5 always writes it as true; the second then tells which version the file holds.

From the paper: RMSNorm without a mean or bias before each part, scores not divided by sqrt(d), and a learned bias for
each bucket of distances, added to the scores. The first block of a stack holds the table of biases, and all its blocks
use it. Bias and masks are combined once per stack into one tensor for all its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import ConfigError, UsageError
from bowline.models.common.activation_functions import activation
from bowline.models.common.attention import attend, split_heads, visible_keys
from bowline.models.common.input_checks import check_embeds, check_ids, check_kept, check_labels, check_tensor
from bowline.models.common.input_embeddings import looked_up
from bowline.models.common.kv_cache import KVCache, check_cache
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput, Seq2SeqOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.models.generation import GenerationMixin
from bowline.nn import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["T5Config", "T5EncoderModel", "T5ForConditionalGeneration", "T5Model"]


@frozen
class T5Config(PreTrainedConfig):
    """The configuration of T5. The defaults are those of T5 v1.0 small.

    T5 v1.1 has `tie_word_embeddings=False, feed_forward_proj="gated-gelu"`.

    Example:
        >>> T5Config().scale_decoder_outputs, T5Config(tie_word_embeddings=False).scale_decoder_outputs
        (True, False)
    """

    model_type = "t5"
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    unsupported: ClassVar = {"add_cross_attention": False, "is_decoder": False}

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    """`None`: as many as the encoder."""
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    scale_decoder_outputs: bool | None = None
    """`None`, as in files of transformers 4: the value of `tie_word_embeddings`."""
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = None
    """`None`: the padding token."""

    def __post_init__(self) -> None:
        self._default("num_decoder_layers", self.num_layers)
        self._default("scale_decoder_outputs", self.tie_word_embeddings)
        self._default("decoder_start_token_id", self.pad_token_id)
        super().__post_init__()
        self.check_sizes("d_model", "d_kv", "d_ff", "num_heads")
        self.check_depth("num_layers", "num_decoder_layers")
        self.check_numbers("dropout_rate", high=1.0)
        self.check_numbers("layer_norm_epsilon", "initializer_factor")
        self.check_sizes("relative_attention_num_buckets", "relative_attention_max_distance")
        if self.relative_attention_num_buckets < 4:
            self.refuse("relative_attention_num_buckets", "at least 4: near and far, before and after")
        near = self.relative_attention_num_buckets // 2
        if self.relative_attention_max_distance <= near:
            self.refuse("relative_attention_max_distance", f"more than half of the buckets, {near}")
        if not isinstance(self.scale_decoder_outputs, bool):
            self.refuse("scale_decoder_outputs", "true, false or null")
        start = self.decoder_start_token_id
        if start is not None and not (isinstance(start, int) and 0 <= start < self.vocab_size):
            self.refuse("decoder_start_token_id", f"a token of the vocabulary, 0 to {self.vocab_size - 1}, or null")
        kind = self.feed_forward_proj.split("-") if isinstance(self.feed_forward_proj, str) else []
        if not (len(kind) == 1 or (len(kind) == 2 and kind[0] == "gated")):
            self.refuse("feed_forward_proj", "an activation, or 'gated-' and an activation")
        activation(self.dense_act_fn)
        for name, value in self._derived().items():
            if self.extra.get(name, value) != value:
                raise ConfigError(
                    f"config.{name} is {self.extra[name]!r:.60}, and feed_forward_proj {self.feed_forward_proj!r} "
                    f"implies {value!r}",
                    help="set the activation in feed_forward_proj, and leave the other key out",
                )
        object.__setattr__(self, "extra", {key: value for key, value in self.extra.items() if key not in DERIVED})

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _derived(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DERIVED}

    @property
    def is_gated_act(self) -> bool:
        """True if the feed-forward part is act(x wi_0) (x wi_1) wo, and false if it is act(x wi) wo."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def dense_act_fn(self) -> str:
        """The activation's name; `gated-gelu` means gelu's tanh form, with which v1.1 was trained."""
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else self.feed_forward_proj.removeprefix("gated-")

    @property
    def on_conflict(self) -> str:
        """The policy for loading a file with a separate head although the flag says tied: "untie" or "raise".

        It is `"untie"` for a true flag with an unscaled output: transformers 5 writes that for v1.1, whose head is
        separate.
        """
        return "untie" if self.tie_word_embeddings and self.scale_decoder_outputs is False else "raise"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **self._derived(), "is_encoder_decoder": self.is_encoder_decoder}


DERIVED = ("dense_act_fn", "is_gated_act")
"""Keys that files hold although they follow from `feed_forward_proj`."""


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(x²) + eps), (..., 1), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


class _Normed(torch.autograd.Function):
    """RMSNorm for the CPU, where torch has no fused one. The backward pass keeps only x, and is twice as fast.

    The backward pass consists of differentiable operations, so second derivatives are right too.
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
    """RMSNorm: weight x / sqrt(mean(x²) + eps)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        plain = x.dtype is self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if plain and not traced and not torch.is_grad_enabled():  # no backward pass: the fewest calls
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if plain and not traced:
            return _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return self.weight * (x * _inverse(x, self.eps)).to(self.weight.dtype)


class T5Attention(nn.Module):
    """Attention softmax(q kᵀ + bias) v. The first one of a stack has the table of biases, (buckets, heads)."""

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
        """`memory` is the encoder's output, to attend to instead of x. Its keys and values are computed once."""
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
    """Return the bucket of each distance, key minus query.

    Each near distance has a bucket of its own; farther buckets widen logarithmically up to `farthest`. With `both_ways`
    half of the buckets is for keys before the query and half for keys after it. Otherwise keys after the query are in
    bucket 0, and are masked.
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
    """The feed-forward part: act(x wi) wo, or gated, (act(x wi_0) (x wi_1)) wo."""

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
    """One residual part, x + dropout(part(norm(x))). The part has the name that checkpoints give it."""

    def __init__(self, config: T5Config, name: str, part: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, part)
        self.layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
        x = x + self.dropout(getattr(self, self.name)(self.layer_norm(x), *inputs))
        if x.dtype == torch.float16:  # an overflow to inf would become NaN in the next norm
            most = torch.finfo(x.dtype).max
            limit = torch.where(x.isinf().any(), most - 1000, most)
            x = x.clamp(-limit, limit)
        return x


class T5Block(nn.Module):
    """One block: self-attention, in the decoder attention to the encoder's output, and the feed-forward part."""

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
    """The encoder or the decoder. `embed_tokens` is the model's `shared` table."""

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
        """Map tokens (B, T) to hidden states (B, T, D). `run(block, *inputs)` calls a block, perhaps checkpointed."""
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
        """Return what every block adds to its scores, (B or 1, H, Q, K): distance biases, and the mask.

        Masked scores get the dtype's least finite number instead of -inf. A query that sees nothing (padding on the
        left) then gives a mean, as in transformers, and never NaN.
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
    """Return the mask to add to the decoder's scores of encoder positions, (B, 1, 1 or Q, K)."""
    if memory is None:
        return None
    batch, length = x.shape[:2]
    if memory.shape[0] != batch:
        raise UsageError(
            f"the encoder has a batch of {memory.shape[0]} and the decoder one of {batch}: expected equal batches"
        )
    seen = visible_keys(mask, batch, length, memory.shape[1], causal=False, device=x.device)
    if seen is None:
        return None
    return x.new_zeros((), dtype=_dtype(x)).where(seen, torch.finfo(_dtype(x)).min)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which attention computes, which the mask must have too."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class T5PreTrainedModel(PreTrainedModel):
    """The base of all T5 classes: config class, table, encoder, initialization."""

    config_class = T5Config
    base_model_prefix = "transformer"
    input_embeddings = "shared"
    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (
        r"layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    )  # cross-attention uses no position bias

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.shared = TiedEmbedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared, config.num_layers, decoder=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw one module. Queries are smaller by sqrt(d), because T5 does not divide the scores by sqrt(d)."""
        config, factor = self.config, self.config.initializer_factor
        width, inner = config.d_model**-0.5, (config.num_heads * config.d_kv) ** -0.5
        if isinstance(module, T5LayerNorm):
            module.weight.fill_(factor)
        elif isinstance(module, T5Attention):
            for part, std in (
                (module.q, width * config.d_kv**-0.5),
                (module.k, width),
                (module.v, width),
                (module.o, inner),
                (getattr(module, "relative_attention_bias", None), width),
            ):
                if part is not None:
                    part.weight.normal_(std=factor * std)
        elif isinstance(module, T5Dense):
            for name, part in module.named_children():
                if isinstance(part, nn.Linear):
                    part.weight.normal_(std=factor * (config.d_ff**-0.5 if name == "wo" else width))
        elif module is self:
            self.shared.weight.normal_(std=factor)
            head = self.get_output_embeddings()
            if head is not None and not config.tie_word_embeddings:
                head.weight.normal_(std=factor)  # type: ignore[operator]

    def _put_table(self, new: nn.Module) -> None:
        for part in (self.encoder, getattr(self, "decoder", None)):
            if part is not None:
                part.embed_tokens = new
        super()._put_table(new)

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> BaseOutput:
        """Run the encoder on tokens (B, T). The result serves as `encoder_outputs` of a later `forward`.

        Raises:
            UsageError: ids or a mask that do not fit.
        """
        return self.encoder(input_ids, attention_mask, output_hidden_states=output_hidden_states, run=self._run)


class T5EncoderModel(T5PreTrainedModel):
    """The encoder alone: tokens (B, T) to hidden states (B, T, D)."""

    _keys_to_ignore_on_load_unexpected = (r"^decoder\.", r"^lm_head\.")

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> BaseOutput:
        """Run the encoder, as `encode` does."""
        return self.encode(input_ids, attention_mask, output_hidden_states=output_hidden_states)


class T5EncoderDecoder(T5PreTrainedModel):
    """The encoder and the decoder. Subclasses end their constructor with `post_init`."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.decoder = T5Stack(config, self.shared, config.num_decoder_layers or config.num_layers, decoder=True)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> Seq2SeqOutput:
        """Masks are as `attention.visible_keys` takes them; `encoder_outputs`, from `encode`, replace `input_ids`.

        `cross_attention_mask`, (B, T) or (B, U, T), says which source tokens the target sees; by default it is
        `attention_mask`. A packed source, whose mask is (B, T, T), needs a `cross_attention_mask`.

        Raises:
            UsageError: ids or a mask that do not fit, a missing source, or a missing target.
        """
        _check_source_and_target(input_ids, encoder_outputs, decoder_input_ids)
        if cross_attention_mask is None and attention_mask is not None:
            cross_attention_mask = _checked_padding_mask(attention_mask)
        if input_ids is not None:
            encoder_outputs = self.encode(input_ids, attention_mask, output_hidden_states=output_hidden_states)
        memory: Any = encoder_outputs[0] if len(encoder_outputs) else None  # (B, T, D)
        check_embeds(memory, self.config.d_model, "encoder_outputs[0]")
        if past_key_values is None and use_cache:
            past_key_values = KVCache(self.config.num_decoder_layers)
        target = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            memory=memory,
            memory_mask=cross_attention_mask,
            cache=past_key_values,
            output_hidden_states=output_hidden_states,
            run=self._run,
        )
        return Seq2SeqOutput(
            last_hidden_state=target.last_hidden_state,
            past_key_values=target.past_key_values,
            decoder_hidden_states=target.hidden_states,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
        )


def _check_source_and_target(input_ids: Any, encoder_outputs: Any, decoder_input_ids: Any) -> None:
    if (input_ids is None) is (encoder_outputs is None):
        raise UsageError("input_ids and encoder_outputs: expected exactly one of them")
    if decoder_input_ids is None:
        raise UsageError(
            "decoder_input_ids are missing: expected the target's tokens",
            help="in a model with a head, labels= is enough",
        )


def _checked_padding_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the source's `attention_mask` for the decoder's attention to the source, if its shape is (B, T).

    Raises:
        UsageError: a mask of another shape, such as (B, T, T), which does not say what the target sees.
    """
    check_tensor(attention_mask, "attention_mask")
    if attention_mask.ndim != 2:
        raise UsageError(
            f"attention_mask {tuple(attention_mask.shape)} says which tokens of the source see each other, and "
            "not which of them the target sees",
            help="also give cross_attention_mask, (B, T) or (B, U, T)",
        )
    return attention_mask


class T5Model(T5EncoderDecoder):
    """Tokens (B, T) of a source and (B, U) of a target to the target's hidden states (B, U, D)."""

    _keys_to_ignore_on_load_unexpected = (*T5EncoderDecoder._keys_to_ignore_on_load_unexpected, r"^lm_head\.")

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.post_init()


class T5ForConditionalGeneration(T5EncoderDecoder, GenerationMixin):
    """T5 with its head: logits (B, U, V), and the loss of the target if `labels` are given."""

    ties: ClassVar = {"lm_head.weight": "shared.weight"}
    output_embeddings = "lm_head"

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.lm_head = LMHead(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **inputs: Any,
    ) -> Seq2SeqOutput:
        """Compute logits, and the loss if `labels` are given; other inputs are as in `T5Model`.

        `labels` are (B, U), -100 at positions to ignore. Without `decoder_input_ids` they are also the decoder's input,
        shifted to the right. If `logits_to_keep` is not 0, only the logits of that many last positions are computed.
        """
        check_kept(logits_to_keep)
        if labels is not None:
            targets = decoder_input_ids.shape if isinstance(decoder_input_ids, torch.Tensor) else None
            check_labels(labels, targets, self.lm_head.out_features)
            if decoder_input_ids is None:
                decoder_input_ids = self._shift_right(labels)
        output = super().forward(input_ids, decoder_input_ids=decoder_input_ids, **inputs)
        hidden = output[0] if labels is not None else output[0][:, -logits_to_keep:]
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        output.logits, output.loss = self._logits_and_loss(hidden, self.lm_head, labels)
        output.last_hidden_state = None
        return output

    def _shift_right(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the start token, then each label but the last, with padding in place of -100: (B, U) to (B, U)."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ConfigError(
                f"config.decoder_start_token_id is {start} and pad_token_id {padding}: labels cannot be shifted",
                help="set both in the config, or give decoder_input_ids",
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, padding)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the decoder's input that belongs to `labels`; transformers' collators call this method."""
        check_labels(labels, None, self.lm_head.out_features)
        return self._shift_right(labels)
