"""Llama, Mistral, Qwen 2 and Qwen 3 in llama.cpp."""

from __future__ import annotations

import re

from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture, Stack, expect, size_in
from bowline.export.gguf.key_values import number, real
from bowline.export.gguf.rotary_scaling import head_size, rope_scaling_keys, rope_settings

__all__ = ["INVERSE_FREQUENCIES", "LAYER", "LLAMA", "NAMES", "QK_NORMS", "QWEN2", "QWEN3", "decoder_keys"]


def decoder_keys(config: Config) -> dict[str, bytes]:
    """The sizes of a decoder with RMS norms, rotary embeddings and a gated feed-forward network."""
    heads = size_in(config, "num_attention_heads")
    stated = config.get("head_dim")
    found = {
        "block_count": number(size_in(config, "num_hidden_layers")),
        "context_length": number(size_in(config, "max_position_embeddings")),
        "embedding_length": number(size_in(config, "hidden_size")),
        "feed_forward_length": number(size_in(config, "intermediate_size")),
        "attention.head_count": number(heads),
        "attention.head_count_kv": number(config.get("num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": real(config.get("rms_norm_eps", 1e-6)),
    }
    if stated is not None:
        found |= {"attention.key_length": number(stated), "attention.value_length": number(stated)}
    return found


def _keys(config: Config) -> dict[str, bytes]:
    expect(config, "hidden_act", ("silu", "swish"), default="silu")
    rope = rope_settings(config)
    base = {"rope.freq_base": real(rope.get("rope_theta") or 10000.0)}
    return decoder_keys(config) | base | rope_scaling_keys(rope, llama3=True)


def _llama_keys(config: Config) -> dict[str, bytes]:
    own = {"vocab_size": number(size_in(config, "vocab_size")), "rope.dimension_count": number(head_size(config))}
    return _keys(config) | own


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
    interleaved=("self_attn.q_proj", "self_attn.k_proj"),
    ignored=INVERSE_FREQUENCIES,
    notes=_notes,
)
QWEN2 = GGUFArchitecture(
    name="qwen2", prefix="model.", names=NAMES, stacks=(STACK,), keys=_keys, ignored=INVERSE_FREQUENCIES, notes=_notes
)
QWEN3 = GGUFArchitecture(
    name="qwen3",
    prefix="model.",
    names=NAMES,
    stacks=(Stack(stored="layers.", written="blk", names={**LAYER, **QK_NORMS}),),
    keys=_keys,
    ignored=INVERSE_FREQUENCIES,
    notes=_notes,
)
