"""GPT-2 in llama.cpp."""

from __future__ import annotations

import re

from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture, Stack, expect, size_in
from bowline.export.gguf.key_values import number, real

__all__ = ["GPT2"]


def _keys(config: Config) -> dict[str, bytes]:
    expect(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), default="gelu_new")
    expect(config, "scale_attn_weights", (True,), default=True)
    expect(config, "scale_attn_by_inverse_layer_idx", (False,), default=False)
    width = size_in(config, "n_embd")
    return {
        "block_count": number(size_in(config, "n_layer")),
        "context_length": number(size_in(config, "n_positions")),
        "embedding_length": number(width),
        "feed_forward_length": number(config.get("n_inner") or 4 * width),
        "attention.head_count": number(size_in(config, "n_head")),
        "attention.layer_norm_epsilon": real(config.get("layer_norm_epsilon", 1e-5)),
    }


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
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ignored=re.compile(r".*\.attn\.(bias|masked_bias)"),
    single=re.compile(r"position_embd\.weight"),
)
