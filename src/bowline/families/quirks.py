"""Facts about model families that the generator cannot read off their classes: one record for each `model_type`.

Each record was read from the classes' source in transformers 4.57.1 and 5.23.0. `quirks_of` is the one way to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["FUSED_NAMES", "FlagValue", "FusedAttention", "FusedOrder", "Quirks", "ScaledBy", "quirks_of"]


class ScaledBy(Enum):
    """The condition under which a class multiplies the decoder's output by d_model^-1/2 in front of the head."""

    FLAG = "tie_word_embeddings"
    """`tie_word_embeddings`, which the config keeps as it is given."""
    OWN_KEY = "scale_decoder_outputs"
    """`scale_decoder_outputs`; where `config.json` lacks that key, its `tie_word_embeddings` decides at load."""
    NOTHING = "always"
    """Nothing: it always scales, because the config makes the flag that it asks true at every load."""
    NEVER = "never"
    """It does not scale."""


class FlagValue(Enum):
    """A value of `tie_word_embeddings` in `config.json` that is neither true nor false."""

    NULL = "null"
    OTHER = "other"


class FusedOrder(Enum):
    """The order of queries, keys and values in one matrix."""

    SIDE_BY_SIDE = "side by side"
    """All queries, then all keys, then all values."""
    BY_HEAD = "by head"
    """Query, key and value of one head, then of the next."""
    BY_KEY_VALUE_HEAD = "by key-value head"
    """The queries that share a key and a value, then that key and that value; then the next such group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """A matrix that computes queries, keys and values in one product: the name of its module, and their order.

    `if_true` maps keys of the config to the order that counts where the key is true; the first such key decides.
    """

    name: str
    order: FusedOrder
    if_true: Mapping[str, FusedOrder] = field(default_factory=dict)

    def order_in(self, config: object) -> FusedOrder:
        """The order under this config."""
        return next((order for key, order in self.if_true.items() if getattr(config, key)), self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The facts of one family; the defaults are those of a family about which nothing special is known."""

    scaled_by: Mapping[int, ScaledBy] = field(default_factory=dict)
    """By major version of transformers: what decides whether the head's input is scaled. Empty: there is no scale."""
    fused_attention: FusedAttention | None = None
    """The fused matrix, if its order is known. Other families have orders of their own (CodeGen: four times queries,
    values, keys)."""
    counted_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By class: the keys of the config that count its vocabulary, where they are not those of its family."""
    same_tokens: tuple[str, ...] = ()
    """Further keys of the config that count the tokens of the same tokenizer."""
    hashes_ids: bool = False
    """The model computes with token ids beside looking rows up: an id has to stay what it is."""
    root_width_scale: bool = False
    """In transformers 4 the forward pass multiplies looked-up embeddings by the square root of `hidden_size`."""
    prompt_rows: bool = False
    """Other keys of the config say how many rows the table has past the vocabulary."""
    ties_beside: Mapping[str, str] = field(default_factory=dict)
    """Tensors without a vocabulary axis that the flag ties as well: target to source."""
    shares_layers: bool = False
    """The flag also ties whole layers, of an encoder and a decoder or of positions."""
    accepted_flags: frozenset[FlagValue] = frozenset()
    """Stated values of `tie_word_embeddings`, neither true nor false, that the config of transformers 5.23 takes."""


FUSED_NAMES = ("c_attn", "qkv_proj", "Wqkv", "qkv")
"""In a module of no family, a matrix of such a name holds queries, keys and values side by side."""

NONE = Quirks()

ANY_VALUE = frozenset(FlagValue)
ONLY_NULL = frozenset({FlagValue.NULL})

SIDE_BY_SIDE, BY_HEAD = FusedOrder.SIDE_BY_SIDE, FusedOrder.BY_HEAD
C_ATTN = FusedAttention(name="c_attn", order=SIDE_BY_SIDE)
QKV_PROJ = FusedAttention(name="qkv_proj", order=SIDE_BY_SIDE)
WQKV = FusedAttention(name="Wqkv", order=SIDE_BY_SIDE)
QUERY_KEY_VALUE = FusedAttention(name="query_key_value", order=BY_HEAD)

BY_FAMILY: Mapping[str, Quirks] = {
    # The output of c_attn is split into three. (CLVP has no c_attn in 5.23.0.)
    "clvp": Quirks(fused_attention=C_ATTN),
    "decision_transformer": Quirks(fused_attention=C_ATTN),
    "gpt2": Quirks(fused_attention=C_ATTN),
    "imagegpt": Quirks(fused_attention=C_ATTN),
    "openai-gpt": Quirks(fused_attention=C_ATTN),
    # The output of c_attn is split into (queries, key, value) with multi_query, else into three within each head.
    "gpt_bigcode": Quirks(
        fused_attention=FusedAttention(name="c_attn", order=BY_HEAD, if_true={"multi_query": SIDE_BY_SIDE})
    ),
    # The output of qkv_proj is sliced at the number of queries, and at that of queries and keys.
    "phi3": Quirks(fused_attention=QKV_PROJ),
    "phi4_multimodal": Quirks(fused_attention=QKV_PROJ),
    # The output of Wqkv is split, chunked or viewed as three.
    "dbrx": Quirks(fused_attention=WQKV),
    "modernbert": Quirks(fused_attention=WQKV),
    "mpt": Quirks(fused_attention=WQKV),
    # The output of query_key_value is viewed as (..., heads, 3 * head size).
    "bloom": Quirks(fused_attention=QUERY_KEY_VALUE),
    "gpt_neox": Quirks(fused_attention=QUERY_KEY_VALUE),
    "gpt_neox_japanese": Quirks(fused_attention=QUERY_KEY_VALUE),
    # Falcon's _split_heads: the new architecture views groups of a key-value head; the old one as Bloom does, or with
    # multi_query the last two heads are the key and the value.
    "falcon": Quirks(
        fused_attention=FusedAttention(
            name="query_key_value",
            order=BY_HEAD,
            if_true={"new_decoder_architecture": FusedOrder.BY_KEY_VALUE_HEAD, "multi_query": SIDE_BY_SIDE},
        )
    ),
    # 4: forward asks config.tie_word_embeddings.
    # 5: the config copies the flag that it is given into scale_decoder_outputs, makes the flag true, and then sets
    #    every other key of config.json, a stored scale_decoder_outputs among them; forward asks that.
    "longt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}),
    "pop2piano": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}),
    "t5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}, accepted_flags=ANY_VALUE),
    # 4 as above. 5: the config makes the flag true, and forward does not scale.
    "mt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NEVER}),
    # 4 as above. 5: forward still asks the flag, and the config keeps what it is given.
    "switch_transformers": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.FLAG}),
    # 4 as above. 5: forward still asks the flag, and the config makes it true. (Udop ties its patches and biases, too.)
    "udop": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NOTHING}, shares_layers=True),
    "umt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NOTHING}, accepted_flags=ANY_VALUE),
    # 5.23: the config sets the flag itself and does not look at the one that it is given.
    "csm": Quirks(accepted_flags=ANY_VALUE),
    "nomic_bert": Quirks(accepted_flags=ANY_VALUE),
    "vibevoice": Quirks(accepted_flags=ANY_VALUE),
    # 5.23: the config declares the flag as bool or None (Perception LM: and then asks its text_config).
    "gemma3": Quirks(accepted_flags=ONLY_NULL),
    "gemma3n": Quirks(accepted_flags=ONLY_NULL),
    "perception_lm": Quirks(accepted_flags=ONLY_NULL),
    # Blt's patcher reads the same bytes, and hashes of groups of ids choose rows of further tables.
    "blt": Quirks(same_tokens=("patcher_config.vocab_size",), hashes_ids=True),
    # T5Gemma's encoder and decoder share a tokenizer; each has a config of its own.
    "t5gemma": Quirks(same_tokens=("decoder.vocab_size",)),
    # 4: normalizer in GemmaModel.forward and Gemma2Model.forward; 5 has a table that multiplies.
    "gemma": Quirks(root_width_scale=True),
    "gemma2": Quirks(root_width_scale=True),
    # NeoMME's head is factorised: the flag ties both factors, the second of them width x rank.
    "neomme": Quirks(ties_beside={"unembedding_projection.weight": "model.embed_tokens.embedding_projection.weight"}),
    # DiffusionGemma's encoder and decoder are the same layers.
    "diffusion_gemma": Quirks(shares_layers=True),
    # CPM-Ant's table has rows for prompts: prompt_types * prompt_length.
    "cpmant": Quirks(prompt_rows=True),
    # The tables of these classes are built from keys other than the family's vocab_size.
    "fine_acoustics": Quirks(counted_by={"BarkFineModel": ("input_vocab_size", "output_vocab_size")}),
    "blip-2": Quirks(
        counted_by={
            "Blip2ForImageTextRetrieval": ("qformer_config.vocab_size",),
            "Blip2TextModelWithProjection": ("qformer_config.vocab_size",),
        }
    ),
    "seamless_m4t": Quirks(
        counted_by={
            "SeamlessM4TCodeHifiGan": ("unit_hifi_gan_vocab_size",),
            "SeamlessM4TTextToUnitForConditionalGeneration": ("vocab_size", "t2u_vocab_size"),
            "SeamlessM4TTextToUnitModel": ("vocab_size", "t2u_vocab_size"),
        }
    ),
}


def quirks_of(family: object) -> Quirks:
    """The record of the family with this `model_type`, or the defaults if there is none.

    Example:
        >>> quirks_of("t5").scaled_by[5].value, quirks_of("gpt2").scaled_by
        ('scale_decoder_outputs', {})
    """
    return BY_FAMILY.get(family, NONE) if isinstance(family, str) else NONE
