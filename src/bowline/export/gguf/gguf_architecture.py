"""How llama.cpp names and lays out the tensors of a class, and which of its sizes it has to know.

Read off llama.cpp's converter and its loader; the test of real models holds both against what is written here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.key_values import number, real, text

__all__ = ["GGUF_CLASSES", "GGUFArchitecture", "architecture_for"]

Config = Mapping[str, Any]
LAYER = re.compile(r"(.*?)(\d+)\.(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """One architecture of llama.cpp: its name there, the names of its tensors, and its keys.

    `names` are tensors outside of layers, `layer_names` those of each layer, by what follows the layer's number, both
    without `.weight` or `.bias`. `layers` is what stands before the number.
    """

    name: str
    prefix: str
    layers: str
    names: Mapping[str, str]
    layer_names: Mapping[str, str]
    keys: Callable[[Config], dict[str, bytes]]
    interleaved: tuple[str, ...] = ()
    """Layers whose rows llama.cpp wants in the order of interleaved rotary embeddings."""
    transposed: tuple[str, ...] = ()
    """Layers that transformers stores transposed."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    single: frozenset[str] = frozenset()
    """Matrices that llama.cpp reads in float32 only."""

    def target(self, stored: str) -> str | None:
        """llama.cpp's name of a stored tensor; `None` if it has no use for it."""
        if self.ignored.fullmatch(stored):
            return None
        bare = stored.removeprefix(self.prefix)
        stem, _, attribute = bare.rpartition(".")
        if stem in self.names:
            return f"{self.names[stem]}.{attribute}"
        inner = LAYER.fullmatch(stem)
        if inner is not None and inner[1] == self.layers and inner[3] in self.layer_names:
            return f"blk.{inner[2]}.{self.layer_names[inner[3]]}.{attribute}"
        raise UsageError(
            f"{shown(stored)}: llama.cpp's {self.name} has no place for this tensor",
            help="convert the model with llama.cpp's own convert_hf_to_gguf.py",
        )

    def layer(self, stored: str) -> str:
        """What follows the layer's number in a stored name, without its last part; empty outside of layers."""
        inner = LAYER.fullmatch(stored.removeprefix(self.prefix).rpartition(".")[0])
        return inner[3] if inner is not None and inner[1] == self.layers else ""

    def heads(self, layer: str, config: Config) -> int:
        """The heads of an interleaved layer."""
        own = "num_key_value_heads" if layer.endswith("k_proj") else "num_attention_heads"
        return int(config.get(own) or config["num_attention_heads"])


def architecture_for(config: Config) -> GGUFArchitecture:
    """The architecture for a checkpoint's class.

    Raises:
        UsageError: no such class is known here, or its config has something that is not written.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None or name not in GGUF_CLASSES:
        raise UsageError(
            f"{shown(name)}: is not exported to GGUF, expected {', '.join(GGUF_CLASSES)}",
            help="convert it with llama.cpp's convert_hf_to_gguf.py, and audit the result with `bowline audit`",
        )
    if config.get("quantization_config"):
        raise UsageError("the weights are quantised, expected floats", help="export the model before it was quantised")
    return GGUF_CLASSES[name]


# --- keys -----------------------------------------------------------------------------------------------------------


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UsageError(f"config.json: {key} is {shown(value)}, expected a whole number", help="mend the config")
    return value


def _llama_keys(config: Config) -> dict[str, bytes]:
    heads, width = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    stated = config.get("head_dim")
    found = {
        "block_count": number(_size(config, "num_hidden_layers")),
        "context_length": number(_size(config, "max_position_embeddings")),
        "embedding_length": number(width),
        "feed_forward_length": number(_size(config, "intermediate_size")),
        "attention.head_count": number(heads),
        "attention.head_count_kv": number(config.get("num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": real(config.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": real(_rope(config).get("rope_theta") or 10000.0),
    }
    if stated is not None:
        found |= {"attention.key_length": number(stated), "attention.value_length": number(stated)}
    kind = _rope(config).get("rope_type") or _rope(config).get("type") or "default"
    if kind == "linear":
        found |= {"rope.scaling.type": text("linear"), "rope.scaling.factor": real(_rope(config)["factor"])}
    elif kind not in ("default", "llama3"):
        raise UsageError(
            f"config.json: the rotary embedding is scaled by {shown(kind)}, expected none, linear or llama3",
            help="convert the model with llama.cpp's own convert_hf_to_gguf.py",
        )
    return found


def _llama_vocabulary_keys(config: Config) -> dict[str, bytes]:
    head = config.get("head_dim") or _size(config, "hidden_size") // _size(config, "num_attention_heads")
    own = {"vocab_size": number(_size(config, "vocab_size")), "rope.dimension_count": number(head)}
    return _llama_keys(config) | own


def _gpt2_keys(config: Config) -> dict[str, bytes]:
    width = _size(config, "n_embd")
    return {
        "block_count": number(_size(config, "n_layer")),
        "context_length": number(_size(config, "n_positions")),
        "embedding_length": number(width),
        "feed_forward_length": number(config.get("n_inner") or 4 * width),
        "attention.head_count": number(_size(config, "n_head")),
        "attention.layer_norm_epsilon": real(config.get("layer_norm_epsilon", 1e-5)),
    }


def _rope(config: Config) -> Mapping[str, Any]:
    """The settings of the rotary embedding, where both versions of transformers write them."""
    found = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            found |= config[key]
    return found


def rope_factors(config: Config) -> npt.NDArray[np.float32] | None:
    """The divisors of Llama 3's frequencies, which llama.cpp reads as a tensor; `None` for another scaling.

    A frequency whose wavelength is below the short bound stays, above the long bound it is divided by the factor, and
    between them the two are mixed (Meta's apply_scaling in llama_models).
    """
    rope = _rope(config)
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return None
    size = config.get("head_dim") or _size(config, "hidden_size") // _size(config, "num_attention_heads")
    base = rope.get("rope_theta") or 10000.0
    frequencies = 1.0 / base ** (np.arange(0, size, 2, dtype=np.float64) / size)
    waves = 2 * math.pi / frequencies
    factor, low, high = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    context = rope.get("original_max_position_embeddings", 8192)
    smooth = (context / waves - low) / (high - low)
    mixed = 1.0 / ((1 - smooth) / factor + smooth)
    found = np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, mixed))
    return found.astype(np.float32)


# --- the classes ----------------------------------------------------------------------------------------------------

_LLAMA_LAYER = {
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
_LLAMA_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_INVERSE_FREQUENCIES = re.compile(r".*rotary_emb\.inv_freq")
_LLAMA = GGUFArchitecture(
    name="llama",
    prefix="model.",
    layers="layers.",
    names=_LLAMA_NAMES,
    layer_names=_LLAMA_LAYER,
    keys=_llama_vocabulary_keys,
    interleaved=("self_attn.q_proj", "self_attn.k_proj"),
    ignored=_INVERSE_FREQUENCIES,
)

GGUF_CLASSES: Mapping[str, GGUFArchitecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": GGUFArchitecture(
        name="qwen2",
        prefix="model.",
        layers="layers.",
        names=_LLAMA_NAMES,
        layer_names=_LLAMA_LAYER,
        keys=_llama_keys,
        ignored=_INVERSE_FREQUENCIES,
    ),
    "Qwen3ForCausalLM": GGUFArchitecture(
        name="qwen3",
        prefix="model.",
        layers="layers.",
        names=_LLAMA_NAMES,
        layer_names={**_LLAMA_LAYER, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
        keys=_llama_keys,
        ignored=_INVERSE_FREQUENCIES,
    ),
    "GPT2LMHeadModel": GGUFArchitecture(
        name="gpt2",
        prefix="transformer.",
        layers="h.",
        names={"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"},
        layer_names={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        keys=_gpt2_keys,
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        ignored=re.compile(r".*\.attn\.(bias|masked_bias)"),
        single=frozenset({"position_embd.weight"}),
    ),
}
"""The classes that are written, by transformers' name."""
