"""Builds tiny random models of nearly any transformers class, for sweeps and inspection.

The default configuration of the class is shrunk key by key: widths, depths, heads, experts and pictures become small,
the vocabulary gets a size that no other axis has, and special token ids are moved into it. The result is built on the
CPU in well under a second, with every parameter filled with its own random values.

Works in transformers 4.57 and 5.23, and imports one model module per class.

Example:
    >>> model = build(load_class("GPT2LMHeadModel"))
    >>> tuple(model.transformer.wte.weight.shape)
    (1031, 32)
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

__all__ = [
    "SMALLEST",
    "VOCABULARY",
    "Sizes",
    "build",
    "candidate_classes",
    "candidate_names",
    "config_from_dict",
    "default_config",
    "fill",
    "load_class",
    "tiny_config",
    "tiny_dict",
    "without_initialisation",
    "written",
]

HEADS = 4
LAYERS = 2


class Sizes(NamedTuple):
    """The sizes of a tiny model.

    The vocabulary is large enough for most default special ids, and should be a size that no other axis has.
    """

    vocabulary: int = 1031
    width: int = 32

    @property
    def head_dim(self) -> int:
        """The width of one of the `HEADS` attention heads."""
        return self.width // HEADS


SMALLEST = Sizes()
VOCABULARY = SMALLEST.vocabulary

Json = dict[str, Any]


def candidate_names() -> list[str]:
    """Names of the model classes that transformers exports, sorted. Imports no model module."""
    transformers = importlib.import_module("transformers")
    return sorted(
        name
        for name, module in transformers._class_to_module.items()
        if re.search(r"\.modeling_(?!tf_|flax_|utils)[a-z0-9_]+$", module)
        and ".auto." not in module
        and not name.startswith(("_", "TF", "Flax"))
        and name[0].isupper()
        and not name.endswith(("PreTrainedModel", "PretrainedModel"))
    )


def load_class(name: str) -> type[Any]:
    """The transformers class called `name`; only its own module is imported.

    Raises:
        LookupError: transformers has no model class of that name that can be built.
    """
    transformers = importlib.import_module("transformers")
    found = getattr(transformers, name, None)
    if (
        not isinstance(found, type)
        or not issubclass(found, transformers.PreTrainedModel)
        or not isinstance(getattr(found, "config_class", None), type)
    ):
        raise LookupError(f"transformers {transformers.__version__} has no concrete model class called {name!r}")
    _stand_in_for_timm()
    return found


@functools.cache
def _stand_in_for_timm() -> None:
    """Let models with a vision tower from timm be built without timm; the tower is left empty."""
    transformers = importlib.import_module("transformers")
    if find_spec("timm"):
        return
    for name in ("TimmWrapperConfig", "Gemma3nVisionConfig"):
        config_class = getattr(transformers, name, None)
        if config_class is not None:
            tower = type("EmptyTower", (transformers.PreTrainedModel,), {"config_class": config_class})
            transformers.AutoModel.register(config_class, tower, exist_ok=True)


def candidate_classes() -> Iterator[tuple[type[Any], type[Any]]]:
    """Every exported model class with its configuration class. Imports each model module when its turn comes."""
    for name in candidate_names():
        try:
            cls = load_class(name)
        except (LookupError, ImportError, RuntimeError):
            continue
        yield cls, cls.config_class


# --- shrinking a configuration ---------------------------------------------------------------------------------------

Shrink = Callable[[int], int]


def _at_most(limit: int) -> Shrink:
    return lambda value: min(value, limit)


def _exactly(size: int) -> Shrink:
    return lambda value: size


def _keep(value: int) -> int:
    return value


def _grouped_heads(value: int) -> int:
    return 1 if value == 1 else 2 if value < HEADS else HEADS


@functools.cache
def _integer_rules(sizes: Sizes) -> list[tuple[str, Shrink]]:
    """The change of an integer, by the first pattern that matches its whole key."""
    return [
        (r"type_vocab_size|num_labels|.*kernel(_size)?s?|.*stride.*|.*dilation", _keep),
        (r".*_version|.*factor|num_feat_extract_layers", _keep),
        (r".*vocab.*", _at_most(sizes.vocabulary)),
        (r".*(key_value_heads|kv_heads|n_head_kv|num_key_value_groups)", _grouped_heads),
        (r".*(attention_heads|num_heads|n_heads?|nhead|_heads)", _exactly(HEADS)),
        (r"rotary_dim", _at_most(sizes.head_dim // 2)),
        (r"mamba_d_head|mamba_head_dim", _exactly(2 * sizes.head_dim)),
        (r"mamba_d_ssm", _exactly(2 * sizes.width)),
        (r".*(head_dim|qk_nope_head_dim|v_head_dim|d_kv|head_size|d_head)", _exactly(sizes.head_dim)),
        (r"(.*_)?(num|n)_(.*_)?layers?|.*_layers|.*depth|num_blocks|num_hidden_groups", _at_most(LAYERS)),
        (r".*(num_|n_)(.*_)?experts(_per_tok|_per_token)?|.*n_routed_experts|moe_topk", _at_most(2)),
        (r"index_topk", _at_most(16)),
        (r".*(top_k|topk).*|.*n_group.*", _at_most(1)),
        (r".*num_channels|in_channels|in_chans", _at_most(3)),
        (r".*patch_size|patch_len|patch_length", _at_most(8)),
        (r"(.*_)?(image_size|img_size|crop_size|input_size)", _exactly(32)),
        (
            r".*(position|max_|length|window|_len|chunk|seq|num_query|num_latents|_tokens|frames|context).*",
            _at_most(64),
        ),
        (
            r".*(hidden|intermediate|dim|width|channels|inner|ffn|_size|d_model|d_ff|n_embd|rank|filters).*",
            _at_most(sizes.width),
        ),
    ]


def _unset(sizes: Sizes) -> Json:
    """Keys that some configurations leave open (null), and a value that fits the other tiny ones."""
    return {
        "downsample_channels": [sizes.width, sizes.width],
        "head_dim": sizes.head_dim,
        "num_key_value_heads": HEADS,
        "vocab_size": sizes.vocabulary,
    }


ROPE: Json = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}


@functools.cache
def _overrides(sizes: Sizes) -> dict[str, Json]:
    """Exceptions to the rules above, by the `model_type` of the level or by the name of the class."""
    return {
        "bamba": {"attn_layer_indices": [1]},
        "bridgetower": {"hidden_size": 64, "text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 64}},
        "chameleon": {"vocabulary_map": {"<image>": 5}},
        "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
        "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
        "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
        "deepseek_v2": {"num_experts_per_tok": 1},
        "dia_decoder": {"num_channels": 9},
        "diffusion_gemma_text": {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": sizes.width},
        "dots1": {
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
        },
        "dots3_note_text": {"per_layer_config": {}, "layer_types": ["full_attention", "full_attention"]},
        "emu3": {"vocabulary_map": {"<image>": 5}},
        "ernie4_5_vl_moe_text": {"rope_parameters": ROPE},
        "esm": {"pad_token_id": 1},
        "fun_asr_nano": {"adaptor_config": {"intermediate_size": sizes.width // 4}},
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "gemma4_assistant": {"text_config": {"num_kv_shared_layers": LAYERS}},
        "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": LAYERS}},
        "glm4v_text": {"rope_parameters": ROPE},
        "glm5_next_text": {"qk_rope_head_dim": 0},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
        "granite4_vision": {
            "deepstack_layer_map": [[0, 0]],
            "downsample_rate": "1/2",
            "vision_config": {"hidden_size": 64},
        },
        "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
        "mamba2": {"num_heads": HEADS, "head_dim": 2 * sizes.head_dim},
        "mimi": {"upsample_groups": 4},
        "mllama_text_model": {"rope_scaling": {"rope_type": "default"}},
        "mobilebert": {"embedding_size": sizes.width // 2},
        "moonshine_streaming": {"num_key_value_heads": HEADS},
        "neomme": {"head_dim": 2 * sizes.head_dim},
        "perception_lm": {"vision_config": {"model_args": {"embed_dim": sizes.width}}},
        "qwen2_5_vl_text": {"rope_parameters": ROPE},
        "qwen2_vl_text": {"rope_parameters": ROPE},
        "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": sizes.width, "rope_scaling": ROPE},
        "qwen3_omni_moe_text": {"rope_scaling": ROPE},
        "qwen3_vl_text": {"rope_scaling": ROPE},
        "qwen3_vl_moe_text": {"rope_scaling": ROPE},
        "qwen4_exp_text": {
            "indexer_n_heads": HEADS,
            "indexer_kv_heads": 1,
            "indexer_head_dim": sizes.head_dim,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
        "reformer": {"axial_pos_embds_dim": [sizes.width // 2, sizes.width // 2], "axial_pos_shape": [8, 8]},
        "ReformerModelWithLMHead": {"is_decoder": True},
        "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    }


ARGUMENTS: dict[str, Json] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "musicgen": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}},
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {},
    },
}
"""Arguments for configurations that cannot be built without any."""

TOKEN_ID = re.compile(r".*(_id|_ids|_index|_token|_idx)|.*token_id.*")
LAYER_LIST = re.compile(r".*(layer_types|layers_block_type|block_types)")
LAYER_COUNT = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")


def _merged(node: Json, changes: Json) -> Json:
    """`node` updated with `changes` at every depth."""
    both = {key: _merged(node[key], value) for key, value in changes.items() if isinstance(node.get(key), dict)}
    return node | changes | both


class _Shrinker:
    """Shrinks a configuration in one pass; records the special ids that it moves, so that they stay distinct."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.moved: dict[int, int] = {}

    def token_id(self, value: int) -> int:
        if value < self.sizes.vocabulary:
            return value
        return self.moved.setdefault(value, self.sizes.vocabulary - 2 - len(self.moved))

    def node(self, node: Json) -> Json:
        stages = "depths" in node
        layers = -1 if stages else next((node[key] for key in LAYER_COUNT if isinstance(node.get(key), int)), -1)
        small = {key: self.value(key, value, layers) for key, value in node.items()}
        for key in {"num_layers"} & set(node) if stages else {"out_features", "out_indices"} & set(node):
            small.pop(key)
        return _merged(small, _overrides(self.sizes).get(str(node.get("model_type")), {}))

    def value(self, key: str, value: Any, layers: int) -> Any:
        if value is None:
            return _unset(self.sizes).get(key)
        if isinstance(value, dict):
            if key == "per_layer_config":
                return {index: item for index, item in value.items() if int(index) < LAYERS}
            return self.node(value)
        if isinstance(value, list):
            return self.sequence(key, value, layers)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if TOKEN_ID.fullmatch(key):
            return self.token_id(value)
        for pattern, rule in _integer_rules(self.sizes):
            if re.fullmatch(pattern, key):
                return rule(value)
        return min(value, 64)

    def sequence(self, key: str, value: list[Any], layers: int) -> list[Any]:
        if LAYER_LIST.fullmatch(key) and value:
            kinds = list(dict.fromkeys(value))
            return (kinds * LAYERS)[:LAYERS]
        if "mrope" in key:
            return [2, 1, 1]
        if len(value) == layers > LAYERS:
            value = value[:LAYERS]
        return [item if item is None else self.value(key, item, layers) for item in value]


def _decoded(value: Any) -> Any:
    """Undo the `{"__float__": "Infinity"}` that some versions write, which not every version reads back."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def written(config: Any) -> Json:
    """Everything that `config` would write to `config.json`, defaults included."""
    content: Json = _decoded(json.loads(config.to_json_string(use_diff=False)))
    return content


def config_from_dict(config_class: type[Any], content: Json) -> Any:
    """The configuration that a `config.json` with this content gives."""
    return config_class.from_dict(json.loads(json.dumps(content)))


def default_config(cls: type[Any]) -> Any:
    """The default configuration of `cls`, at full size."""
    return cls.config_class(**copy.deepcopy(ARGUMENTS.get(cls.config_class.model_type, {})))


def tiny_dict(cls: type[Any], sizes: Sizes = SMALLEST) -> Json:
    """The content of `config.json` for a tiny model of `cls`."""
    return _merged(_Shrinker(sizes).node(written(default_config(cls))), _overrides(sizes).get(cls.__name__, {}))


def tiny_config(cls: type[Any], sizes: Sizes = SMALLEST) -> Any:
    """The default configuration of `cls`, shrunk at every level."""
    return config_from_dict(cls.config_class, tiny_dict(cls, sizes))


# --- building --------------------------------------------------------------------------------------------------------


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter its own random values, in place; shared parameters are drawn once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Skip the initialisation of models built inside, which is slow and fails in a few classes."""
    base = importlib.import_module("transformers").PreTrainedModel
    original = base.initialize_weights
    base.initialize_weights = lambda self: None
    try:
        yield
    finally:
        base.initialize_weights = original


def build(cls: type[Any], config: Any = None, seed: int = 0) -> Any:
    """A small float32 model on the CPU, in eval mode, each parameter with distinct random values, ties in force."""
    torch.manual_seed(seed)
    config = tiny_config(cls) if config is None else config
    with without_initialisation():
        model = cls(config).float().eval()
    fill(model, seed)
    model.tie_weights()
    return model
