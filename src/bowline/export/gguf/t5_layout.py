"""T5 and mT5 in llama.cpp, encoder and decoder.

llama.cpp does not scale a tied T5's logits. The scale is therefore written into the decoder's last norm.
"""

from __future__ import annotations

import re

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture, Stack, expect, number_in, size_in
from bowline.export.gguf.key_values import number, real
from bowline.export.gguf.tensor_shapes import Shape, TensorShapes

__all__ = ["T5"]


def _keys(config: Config) -> dict[str, bytes]:
    _gated(config)
    expect(config, "relative_attention_max_distance", (128,), default=128)
    layers = size_in(config, "num_layers")
    decoder_layers = size_in(config, "num_decoder_layers", layers)
    if decoder_layers > layers:
        raise UsageError(
            f"config.json: num_decoder_layers is {decoder_layers}, expected at most the encoder's {layers}: llama.cpp "
            "does not load a deeper decoder",
            help="run the model in transformers or onnxruntime (`bowline export --to onnx`)",
        )
    first = config.get("decoder_start_token_id")
    if type(first) is not int or not 0 <= first < size_in(config, "vocab_size"):
        raise UsageError(
            f"config.json: decoder_start_token_id is {shown(first)}, expected the token that the decoder begins with",
            help="set it; T5 begins with its pad_token_id, 0",
        )
    head, epsilon = size_in(config, "d_kv"), number_in(config, "layer_norm_epsilon", 1e-6)
    return {
        "context_length": number(size_in(config, "n_positions", 512)),
        "embedding_length": number(size_in(config, "d_model")),
        "feed_forward_length": number(size_in(config, "d_ff")),
        "block_count": number(layers),
        "decoder_block_count": number(decoder_layers),
        "attention.head_count": number(size_in(config, "num_heads")),
        "attention.key_length": number(head),
        "attention.value_length": number(head),
        "attention.layer_norm_epsilon": real(epsilon),
        "attention.relative_buckets_count": number(_buckets(config)),
        "attention.layer_norm_rms_epsilon": real(epsilon),
        "decoder_start_token_id": number(first),
    }


def _gated(config: Config) -> bool:
    """Whether the feed-forward network has a gate; `UsageError` if its activation is not llama.cpp's."""
    default = "gated-gelu" if config.get("model_type") == "mt5" else "relu"
    expect(config, "feed_forward_proj", ("relu", "gated-gelu"), default=default)
    return bool(config.get("feed_forward_proj", default) == "gated-gelu")


def _buckets(config: Config) -> int:
    return size_in(config, "relative_attention_num_buckets", 32)


def _shapes(config: Config) -> TensorShapes:
    width, inner, heads = size_in(config, "d_model"), size_in(config, "d_ff"), size_in(config, "num_heads")
    layers, size = size_in(config, "num_layers"), heads * size_in(config, "d_kv")

    def attention(name: str) -> dict[str, Shape]:
        projections: dict[str, Shape] = {f"{name}_{part}.weight": (size, width) for part in "qkv"}
        return {f"{name}_norm.weight": (width,), **projections, f"{name}_o.weight": (width, size)}

    encoder: dict[str, Shape] = {
        **attention("attn"),
        "ffn_norm.weight": (width,),
        "ffn_up.weight": (inner, width),
        "ffn_down.weight": (width, inner),
    }
    if _gated(config):
        encoder["ffn_gate.weight"] = (inner, width)
    return TensorShapes(
        outside={
            "token_embd.weight": (size_in(config, "vocab_size"), width),
            "enc.output_norm.weight": (width,),
            "dec.output_norm.weight": (width,),
            "enc.blk.0.attn_rel_b.weight": (_buckets(config), heads),
            "dec.blk.0.attn_rel_b.weight": (_buckets(config), heads),
        },
        stacks={
            "enc.blk": (layers, encoder),
            "dec.blk": (size_in(config, "num_decoder_layers", layers), {**encoder, **attention("cross_attn")}),
        },
    )


def _attention(stored: str, written: str) -> dict[str, str]:
    names = {f"{stored}.{part}": f"{written}_{part}" for part in "qkvo"}
    return {**names, f"{stored}.relative_attention_bias": f"{written}_rel_b"}


def _feed_forward(layer: int) -> dict[str, str]:
    parts = {"wi": "ffn_up", "wi_0": "ffn_gate", "wi_1": "ffn_up", "wo": "ffn_down"}
    names = {f"layer.{layer}.DenseReluDense.{stored}": written for stored, written in parts.items()}
    return {**names, f"layer.{layer}.layer_norm": "ffn_norm"}


ENCODER = {
    **_attention("layer.0.SelfAttention", "attn"),
    "layer.0.layer_norm": "attn_norm",
    **_feed_forward(1),
}
DECODER = {
    **_attention("layer.0.SelfAttention", "attn"),
    "layer.0.layer_norm": "attn_norm",
    **_attention("layer.1.EncDecAttention", "cross_attn"),
    "layer.1.layer_norm": "cross_attn_norm",
    **_feed_forward(2),
}
T5 = GGUFArchitecture(
    name="t5",
    prefix="",
    names={
        "shared": "token_embd",
        "encoder.embed_tokens": "token_embd",
        "decoder.embed_tokens": "token_embd",
        "encoder.final_layer_norm": "enc.output_norm",
        "decoder.final_layer_norm": "dec.output_norm",
        "lm_head": "output",
    },
    stacks=(
        Stack(stored="encoder.block.", written="enc.blk", names=ENCODER),
        Stack(stored="decoder.block.", written="dec.blk", names=DECODER),
    ),
    keys=_keys,
    shapes=_shapes,
    ignored=re.compile(
        r".*\.EncDecAttention\.relative_attention_bias\.weight"
    ),  # T5 v1.0 stores one that nothing reads
    single=re.compile(r".*_rel_b\.weight"),
    last_norm="dec.output_norm.weight",
)
