"""T5 (Raffel et al., 2020): an encoder and a decoder on one table, and a scale that belongs to the tie.

The tie: `shared` is one module, which encoder and decoder both hold as `embed_tokens`. Whether the head is it too:

    v1.0   lm_head.weight is shared.weight   logits = d_model^-1/2 h sharedᵀ   tied and scaled
    v1.1   a head of its own                 logits = h lm_headᵀ               untied, gated, unscaled

Why the scale goes with the tie: the table is drawn with std 1, so a row has norm sqrt(d_model), and so has h after the
last norm. Unscaled, tied logits have std sqrt(d_model): at 512 wide the first loss is about 161, not ln V = 10.9. The
config states the two apart: `tie_word_embeddings` and `scale_decoder_outputs`. Files of transformers 4 know only the
flag, which decides both; transformers 5 writes the flag true always, so that the scale says what the file was.

From the paper: RMSNorm without a mean or bias before each part, scores not divided by sqrt(d), and a learned bias of
each distance's bucket added to them: the first block of a stack holds the table, and all its blocks use it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import ConfigError, UsageError
from bowline.models.base import PreTrainedModel
from bowline.models.blocks import activation, check_embeds, check_kept, check_labels, check_tensor
from bowline.models.cache import KVCache
from bowline.models.config import PreTrainedConfig, frozen
from bowline.models.generation import GenerationMixin
from bowline.models.outputs import BaseOutput, Seq2SeqOutput
from bowline.models.t5_stack import T5Attention, T5Dense, T5LayerNorm, T5Stack
from bowline.nn import LMHead
from bowline.nn.lookup import TiedEmbedding

__all__ = ["T5Config", "T5EncoderModel", "T5ForConditionalGeneration", "T5Model"]


@frozen
class T5Config(PreTrainedConfig):
    """T5 v1.0 small, unless other values are given; `tie_word_embeddings=False, feed_forward_proj="gated-gelu"`: v1.1.

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
    """`None`, as in the files of transformers 4: what `tie_word_embeddings` says."""
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
                    f"makes it {value!r}",
                    help="state the activation in feed_forward_proj, and leave the other key out",
                )
        object.__setattr__(self, "extra", {key: value for key, value in self.extra.items() if key not in DERIVED})

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _derived(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DERIVED}

    @property
    def is_gated_act(self) -> bool:
        """Whether the feed-forward part is act(x wi_0) (x wi_1) wo, not act(x wi) wo."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def dense_act_fn(self) -> str:
        """The activation's name; `gated-gelu` means the tanh form, as v1.1 was trained."""
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else self.feed_forward_proj.removeprefix("gated-")

    @property
    def on_conflict(self) -> str:
        """What a load does where the file holds a head of its own under a true flag.

        A true flag beside an unscaled output is what transformers 5 writes for v1.1, whose head is its own: `"untie"`.
        """
        return "untie" if self.tie_word_embeddings and self.scale_decoder_outputs is False else "raise"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **self._derived(), "is_encoder_decoder": self.is_encoder_decoder}


DERIVED = ("dense_act_fn", "is_gated_act")
"""Keys that files hold beside `feed_forward_proj`, from which they follow."""


class T5PreTrainedModel(PreTrainedModel):
    """What all classes have: the config, the table, the encoder, the draws."""

    config_class = T5Config
    base_model_prefix = "transformer"
    input_embeddings = "shared"
    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (
        r"layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    )  # no use

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.shared = TiedEmbedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared, config.num_layers, decoder=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Queries are drawn smaller by sqrt(d), which stands for the division of the scores that T5 leaves out."""
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
        """The encoder's `last_hidden_state` (B, T, D) of tokens (B, T): `encoder_outputs` of a later `forward`.

        Raises:
            UsageError: ids or a mask that do not fit.
        """
        return self.encoder(input_ids, attention_mask, output_hidden_states=output_hidden_states, run=self._run)


class T5EncoderModel(T5PreTrainedModel):
    """The encoder alone: tokens (B, T) to their hidden states (B, T, D)."""

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
        """`encode`."""
        return self.encode(input_ids, attention_mask, output_hidden_states=output_hidden_states)


class T5EncoderDecoder(T5PreTrainedModel):
    """The encoder and the decoder; a class that is built on it draws at its end."""

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
        """Masks as `blocks.visible_keys` has them; `encoder_outputs` of `encode` stand for `input_ids`.

        `cross_attention_mask`, (B, T) or (B, U, T), is what the target sees of the source: `attention_mask` unless it
        is given. A packed source, whose mask is (B, T, T), needs one.

        Raises:
            UsageError: ids or a mask that do not fit, or no source, or no target.
        """
        if (input_ids is None) is (encoder_outputs is None):
            raise UsageError("input_ids and encoder_outputs: expected one of them")
        if decoder_input_ids is None:
            raise UsageError(
                "no decoder_input_ids: expected the target's tokens", help="with a head, labels= gives them too"
            )
        if cross_attention_mask is None and attention_mask is not None:
            check_tensor(attention_mask, "attention_mask")
            if attention_mask.ndim != 2:
                raise UsageError(
                    f"attention_mask {tuple(attention_mask.shape)} says which tokens of the source see each other, and "
                    "not which the target sees",
                    help="give cross_attention_mask too, (B, T) or (B, U, T)",
                )
            cross_attention_mask = attention_mask
        if input_ids is not None:
            encoder_outputs = self.encode(input_ids, attention_mask, output_hidden_states=output_hidden_states)
        memory: Any = encoder_outputs[0] if len(encoder_outputs) else None
        check_embeds(memory, self.config.d_model, "encoder_outputs[0]")
        target = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            memory=memory,
            memory_mask=cross_attention_mask,
            cache=past_key_values
            if past_key_values is not None
            else KVCache(self.config.num_decoder_layers)
            if use_cache
            else None,
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


class T5Model(T5EncoderDecoder):
    """Tokens (B, T) of a source and (B, U) of a target to the target's hidden states (B, U, D)."""

    _keys_to_ignore_on_load_unexpected = (*T5EncoderDecoder._keys_to_ignore_on_load_unexpected, r"^lm_head\.")

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.post_init()


class T5ForConditionalGeneration(T5EncoderDecoder, GenerationMixin):
    """T5 with its head: logits (B, U, V), and the loss of the target where there are `labels`."""

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
        """As `T5Model`; `labels` (B, U), -100 where none counts, are also the decoder's tokens, shifted to the right.

        Of the logits only those of the last `logits_to_keep` positions are made, where that is not 0.
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
        """The token to start with, then each label but the last, with padding where there is none: (B, U) to (B, U)."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ConfigError(
                f"config.decoder_start_token_id is {start} and pad_token_id {padding}: labels cannot be shifted",
                help="set both in the config, or give decoder_input_ids",
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, padding)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """What the decoder is given where it is to predict `labels`: transformers' collators ask for it."""
        check_labels(labels, None, self.lm_head.out_features)
        return self._shift_right(labels)
