"""Llama, Mistral, Qwen 2 and Qwen 3 in llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import (
    Config,
    GGUFArchitecture,
    Stack,
    expect,
    number_in,
    positive_in,
    size_in,
)
from bowline.export.gguf.key_values import number, real
from bowline.export.gguf.rotary_scaling import head_size, rope_scaling_keys, rope_settings
from bowline.export.gguf.tensor_shapes import Shape, TensorShapes

__all__ = [
    "INVERSE_FREQUENCIES",
    "LAYER",
    "LLAMA",
    "NAMES",
    "QK_NORMS",
    "QWEN2",
    "QWEN3",
    "decoder_keys",
    "decoder_shapes",
]


def decoder_keys(config: Config) -> dict[str, bytes]:
    """The sizes of a decoder with RMS norms, rotary embeddings and a gated feed-forward network."""
    heads = size_in(config, "num_attention_heads")
    groups = size_in(config, "num_key_value_heads", heads)
    if heads % groups:
        raise UsageError(
            f"config.json: num_key_value_heads is {groups}, expected a divisor of the {heads} heads",
            help="set it to the model's own, or fetch config.json again",
        )
    found = {
        "block_count": number(size_in(config, "num_hidden_layers")),
        "context_length": number(size_in(config, "max_position_embeddings")),
        "embedding_length": number(size_in(config, "hidden_size")),
        "feed_forward_length": number(size_in(config, "intermediate_size")),
        "attention.head_count": number(heads),
        "attention.head_count_kv": number(groups),
        "attention.layer_norm_rms_epsilon": real(number_in(config, "rms_norm_eps", 1e-6)),
    }
    if config.get("head_dim") is not None:
        stated = head_size(config)
        found |= {"attention.key_length": number(stated), "attention.value_length": number(stated)}
    return found


def decoder_shapes(
    config: Config, *, biases: Sequence[str] = (), widths: Sequence[str] = (), heads: Sequence[str] = ()
) -> TensorShapes:
    """The shapes of such a decoder's tensors.

    Arguments:
        biases: the linear layers of each layer that have one.
        widths: further vectors of each layer that are as long as the model is wide.
        heads: those that are as long as a head.
    """
    width, inner = size_in(config, "hidden_size"), size_in(config, "intermediate_size")
    count, size = size_in(config, "num_attention_heads"), head_size(config)
    queries, keys = count * size, size_in(config, "num_key_value_heads", count) * size
    shapes: dict[str, Shape] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (queries, width),
        "attn_k.weight": (keys, width),
        "attn_v.weight": (keys, width),
        "attn_output.weight": (width, queries),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (inner, width),
        "ffn_up.weight": (inner, width),
        "ffn_down.weight": (width, inner),
    }
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biases}
    shapes |= {f"{name}.weight": (width,) for name in widths} | {f"{name}.weight": (size,) for name in heads}
    return TensorShapes(
        outside={"token_embd.weight": (size_in(config, "vocab_size"), width), "output_norm.weight": (width,)},
        stacks={"blk": (size_in(config, "num_hidden_layers"), shapes)},
    )


def _keys(config: Config, *, llama3: bool = False) -> dict[str, bytes]:
    expect(config, "hidden_act", ("silu", "swish"), default="silu")
    rope = rope_settings(config)
    base = {"rope.freq_base": real(positive_in(rope, "rope_theta", 10000.0))}
    return decoder_keys(config) | base | rope_scaling_keys(rope, llama3=llama3)


def _llama_keys(config: Config) -> dict[str, bytes]:
    own = {"vocab_size": number(size_in(config, "vocab_size")), "rope.dimension_count": number(head_size(config))}
    return _keys(config, llama3=True) | own


def _llama_shapes(config: Config) -> TensorShapes:
    """The shapes of a Llama, with the biases that its config asks for, or of a Mistral, which has none."""
    mistral = config.get("model_type") == "mistral"
    attention = ATTENTION if _flag(config, "attention_bias") and not mistral else ()
    feed_forward = FEED_FORWARD if _flag(config, "mlp_bias") and not mistral else ()
    return decoder_shapes(config, biases=(*attention, *feed_forward))


def _qwen2_shapes(config: Config) -> TensorShapes:
    width, heads = size_in(config, "hidden_size"), size_in(config, "num_attention_heads")
    if heads * head_size(config) != width:
        raise UsageError(
            f"config.json: {heads} heads of {head_size(config)} features, expected {width} together: llama.cpp's qwen2 "
            "has no other size of heads",
            help="run the model in transformers or vLLM",
        )
    return decoder_shapes(config, biases=ATTENTION[:3])


def _qwen3_shapes(config: Config) -> TensorShapes:
    expect(config, "attention_bias", (False, None), default=False)
    return decoder_shapes(config, heads=("attn_q_norm", "attn_k_norm"))


def _flag(config: Config, key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected true or false", help="fetch config.json again"
        )
    return value is True


def _notes(config: Config) -> tuple[str, ...]:
    """Name a window of attention, which llama.cpp's architectures for these classes do not have."""
    window, context = config.get("sliding_window"), size_in(config, "max_position_embeddings")
    used = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    if type(window) is not int or window >= context or used is False:
        return ()
    return (
        f"attention has a window of {window} tokens here and none in llama.cpp: texts of more than {window} tokens "
        "give other logits",
    )


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
STACK = Stack(stored="layers.", written="blk", names=LAYER)
INVERSE_FREQUENCIES = re.compile(r".*rotary_emb\.inv_freq")
LLAMA = GGUFArchitecture(
    name="llama",
    prefix="model.",
    names=NAMES,
    stacks=(STACK,),
    keys=_llama_keys,
    shapes=_llama_shapes,
    interleaved=("self_attn.q_proj", "self_attn.k_proj"),
    ignored=INVERSE_FREQUENCIES,
    notes=_notes,
)
QWEN2 = GGUFArchitecture(
    name="qwen2",
    prefix="model.",
    names=NAMES,
    stacks=(STACK,),
    keys=_keys,
    shapes=_qwen2_shapes,
    ignored=INVERSE_FREQUENCIES,
    notes=_notes,
)
QWEN3 = GGUFArchitecture(
    name="qwen3",
    prefix="model.",
    names=NAMES,
    stacks=(Stack(stored="layers.", written="blk", names={**LAYER, **QK_NORMS}),),
    keys=_keys,
    shapes=_qwen3_shapes,
    ignored=INVERSE_FREQUENCIES,
    notes=_notes,
)
