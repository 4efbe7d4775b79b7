"""Gemma, Gemma 2 and Gemma 3 (text) in llama.cpp.

transformers multiplies normalised states by one plus the stored weight, llama.cpp by the weight: it is written with the
one added. llama.cpp multiplies looked-up rows by the square root of the width itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture, Stack, expect, positive_in, size_in
from bowline.export.gguf.key_values import booleans, number, real
from bowline.export.gguf.llama_layout import INVERSE_FREQUENCIES, LAYER, NAMES, QK_NORMS, decoder_keys, decoder_shapes
from bowline.export.gguf.rotary_scaling import rope_object, rope_scaling_keys, rope_settings
from bowline.export.gguf.tensor_shapes import TensorShapes

__all__ = ["GEMMA", "GEMMA2", "GEMMA3"]

GLOBAL_BASE, LOCAL_BASE = 1_000_000.0, 10_000.0
"""Gemma 3's bases of rotary embeddings, of layers that see everything and of layers with a window."""
KINDS = ("sliding_attention", "full_attention")
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The number of layers by which llama.cpp knows the 27B model, whose queries it scales by another size."""


def _gemma_keys(config: Config) -> dict[str, bytes]:
    _check(config)
    return decoder_keys(_with_head_size(config)) | _rope_keys(rope_settings(config))


def _gemma2_keys(config: Config) -> dict[str, bytes]:
    _check(config)
    _check_query_scale(config, "gemma2")
    return {
        **decoder_keys(_with_head_size(config)),
        **_rope_keys(rope_settings(config)),
        "attn_logit_softcapping": real(_softcap(config, "attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": real(_softcap(config, "final_logit_softcapping", 30.0)),
        **_window_keys(config, 2),
    }


def _gemma3_keys(config: Config) -> dict[str, bytes]:
    _check(config)
    _check_query_scale(config, "gemma3")
    expect(config, "attn_logit_softcapping", (None,), default=None)
    found = decoder_keys(_with_head_size(config)) | _window_keys(config, 6)
    if config.get("final_logit_softcapping") is not None:
        found["final_logit_softcapping"] = real(positive_in(config, "final_logit_softcapping"))
    wide, near = _both_ropes(config)
    kind = near.get("rope_type") or near.get("type") or "default"
    if kind != "default":
        raise UsageError(
            f"config.json: the rotary embedding of layers with a window is scaled by {shown(kind)}, expected none",
            help="llama.cpp scales only the layers without a window",
        )
    found |= _rope_keys(wide, GLOBAL_BASE)
    return found | {"rope.freq_base_swa": real(positive_in(near, "rope_theta", LOCAL_BASE))}


def _both_ropes(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of the rotary embeddings of layers that see everything, and of layers with a window."""
    both = rope_object(config, "rope_parameters")
    wide = {"rope_theta": config.get("rope_theta"), **rope_object(both, "full_attention")}
    near = {"rope_theta": config.get("rope_local_base_freq"), **rope_object(both, "sliding_attention")}
    return {**wide, **rope_object(config, "rope_scaling")}, near


def _with_head_size(config: Config) -> Config:
    """The config with the size of heads, which llama.cpp wants stated."""
    return {**config, "head_dim": _head_size(config)}


def _head_size(config: Config) -> int:
    return size_in(config, "head_dim", 256)


def _rope_keys(rope: Mapping[str, Any], base: float = LOCAL_BASE) -> dict[str, bytes]:
    return {"rope.freq_base": real(positive_in(rope, "rope_theta", base))} | rope_scaling_keys(rope, llama3=False)


def _check(config: Config) -> None:
    """Refuse what llama.cpp computes in one way only."""
    key = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    expect(config, key, ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    expect(config, "attention_bias", (False, None), default=False)
    expect(config, "use_bidirectional_attention", (False, None), default=False)


def _check_query_scale(config: Config, name: str) -> None:
    """Refuse a scale of queries that llama.cpp does not compute with; it reads no key for it."""
    if size_in(config, "num_hidden_layers") == LAYERS_OF_27B[name]:
        known = size_in(config, "hidden_size") // size_in(config, "num_attention_heads")
    else:
        known = _head_size(config)
    stated = config.get("query_pre_attn_scalar", 256)
    if stated != known or isinstance(stated, bool):
        factor = math.sqrt(known / positive_in(config, "query_pre_attn_scalar"))
        raise UsageError(
            f"config.json: query_pre_attn_scalar is {shown(stated)}, but llama.cpp computes with {known}",
            help=f"multiply the weights of q_proj (Gemma 3: of q_norm, plus one) by {factor:.6g} and set the key to "
            f"{known}: the model stays the same",
        )


def _softcap(config: Config, key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected a positive number, since llama.cpp always caps here",
            help="set it to a number that the scores never come near, such as 1e6, if the model has no cap",
        )
    return float(value)


def _window_keys(config: Config, period: int) -> dict[str, bytes]:
    """The window of attention, and which layers have it, unless those are llama.cpp's: all but the last of `period`."""
    layers = size_in(config, "num_hidden_layers")
    usual = [(layer + 1) % period != 0 for layer in range(layers)]
    stated = config.get("layer_types")
    if stated is not None:
        if not isinstance(stated, list) or len(stated) != layers or any(kind not in KINDS for kind in stated):
            raise UsageError(
                f"config.json: layer_types is {shown(stated)}, expected sliding_attention or full_attention for each "
                f"of {layers} layers",
                help="mend the config",
            )
        slides = [kind == "sliding_attention" for kind in stated]
    else:
        own = size_in(config, "sliding_window_pattern", period)
        slides = [(layer + 1) % own != 0 for layer in range(layers)]
    if not any(slides):
        if period == 2:
            raise UsageError(
                "config.json: no layer has a window, but llama.cpp's gemma2 always has one",
                help="set sliding_window to max_position_embeddings, and layer_types to sliding_attention in turn",
            )
        return {}
    found = {"attention.sliding_window": number(size_in(config, "sliding_window"))}
    if slides != usual:
        found["attention.sliding_window_pattern"] = booleans(slides)
    return found


def _shapes(config: Config) -> TensorShapes:
    return decoder_shapes(_with_head_size(config))


def _gemma2_shapes(config: Config) -> TensorShapes:
    return decoder_shapes(_with_head_size(config), widths=("post_attention_norm", "post_ffw_norm"))


def _gemma3_shapes(config: Config) -> TensorShapes:
    return decoder_shapes(
        _with_head_size(config), widths=("post_attention_norm", "post_ffw_norm"), heads=("attn_q_norm", "attn_k_norm")
    )


SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Gemma 2 and 3 normalise before and after each part of a layer."""
NORMS = re.compile(r".*norm\.weight")
GEMMA = GGUFArchitecture(
    name="gemma",
    prefix="model.",
    names=NAMES,
    stacks=(Stack(stored="layers.", written="blk", names=LAYER),),
    keys=_gemma_keys,
    shapes=_shapes,
    one_less=NORMS,
    ignored=INVERSE_FREQUENCIES,
    has_head=False,
)
GEMMA2 = GGUFArchitecture(
    name="gemma2",
    prefix="model.",
    names=NAMES,
    stacks=(Stack(stored="layers.", written="blk", names={**LAYER, **SANDWICH}),),
    keys=_gemma2_keys,
    shapes=_gemma2_shapes,
    one_less=NORMS,
    ignored=INVERSE_FREQUENCIES,
    has_head=False,
)
GEMMA3 = GGUFArchitecture(
    name="gemma3",
    prefix="model.",
    names=NAMES,
    stacks=(Stack(stored="layers.", written="blk", names={**LAYER, **SANDWICH, **QK_NORMS}),),
    keys=_gemma3_keys,
    shapes=_gemma3_shapes,
    one_less=NORMS,
    ignored=INVERSE_FREQUENCIES,
)
