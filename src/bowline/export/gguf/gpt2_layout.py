"""GPT-2 in llama.cpp."""

from __future__ import annotations

import re

from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture, Stack, expect, number_in, size_in
from bowline.export.gguf.key_values import number, real
from bowline.export.gguf.tensor_shapes import Shape, TensorShapes

__all__ = ["GPT2"]


def _keys(config: Config) -> dict[str, bytes]:
    expect(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), default="gelu_new")
    expect(config, "scale_attn_weights", (True,), default=True)
    expect(config, "scale_attn_by_inverse_layer_idx", (False,), default=False)
    width, heads = size_in(config, "n_embd"), size_in(config, "n_head")
    if width % heads:
        raise UsageError(
            f"config.json: n_head is {heads}, expected a divisor of n_embd, {width}", help="fetch config.json again"
        )
    return {
        "block_count": number(size_in(config, "n_layer")),
        "context_length": number(size_in(config, "n_positions")),
        "embedding_length": number(width),
        "feed_forward_length": number(size_in(config, "n_inner", 4 * width)),
        "attention.head_count": number(heads),
        "attention.layer_norm_epsilon": real(number_in(config, "layer_norm_epsilon", 1e-5)),
    }


def _shapes(config: Config) -> TensorShapes:
    width = size_in(config, "n_embd")
    inner = size_in(config, "n_inner", 4 * width)
    matrices: dict[str, Shape] = {
        "attn_qkv": (3 * width, width),
        "attn_output": (width, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes |= {f"{norm}.{part}": (width,) for norm in ("attn_norm", "ffn_norm") for part in ("weight", "bias")}
    return TensorShapes(
        outside={
            "token_embd.weight": (size_in(config, "vocab_size"), width),
            "position_embd.weight": (size_in(config, "n_positions"), width),
            "output_norm.weight": (width,),
            "output_norm.bias": (width,),
        },
        stacks={"blk": (size_in(config, "n_layer"), shapes)},
    )


LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2 = GGUFArchitecture(
    name="gpt2",
    prefix="transformer.",
    names={"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"},
    stacks=(Stack(stored="h.", written="blk", names=LAYER),),
    keys=_keys,
    shapes=_shapes,
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ignored=re.compile(r".*\.attn\.(bias|masked_bias)"),
    single=re.compile(r"position_embd\.weight"),
)
