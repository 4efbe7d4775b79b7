"""Small checkpoints in the layouts that transformers 5.23 writes: GPT-2, BERT, T5 v1.0, T5 v1.1, Llama.

Config keys, tensor names, dtypes and files are transformers' own; the values are drawn, but with the marks that
training leaves on a vocabulary table: a decaying spectrum, row norms that spread, a padding row like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.numpy_writer import save_safetensors

__all__ = ["SINGLE_FILE", "Layout", "bert", "gpt2", "llama", "t5_v1_0", "t5_v1_1"]

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

VOCABULARY = 4096
HIDDEN = 96
HEADS = 4
LAYERS = 2

Array = npt.NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]
Files = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint before it is written: its config, and each weight file with its tensors."""

    config: Mapping[str, Any]
    files: Files

    def tensor(self, name: str) -> Array:
        """The tensor of that name."""
        return next(tensors[name] for tensors in self.files.values() if name in tensors)

    def with_config(self, **keys: Any) -> Layout:
        """The same tensors under a config with these keys changed."""
        return replace(self, config={**self.config, **keys})

    def with_tensor(self, name: str, value: Array) -> Layout:
        """The layout with one tensor added or replaced: in the file that has the name, otherwise in the last file."""
        home = next((file for file, tensors in self.files.items() if name in tensors), list(self.files)[-1])
        return self.with_file(home, {**self.files[home], name: value})

    def without_tensor(self, name: str) -> Layout:
        """The layout without one tensor."""
        kept = {file: {key: tensors[key] for key in tensors if key != name} for file, tensors in self.files.items()}
        return replace(self, files=kept)

    def with_file(self, file: str, tensors: Mapping[str, Array]) -> Layout:
        """The layout with one weight file added or replaced."""
        return replace(self, files={**self.files, file: tensors})

    def write(self, directory: Path) -> None:
        """Write `config.json`, the weights, and the index if there are shards."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(dict(self.config), indent=2, sort_keys=True) + "\n")
        for file, tensors in self.files.items():
            save_safetensors(directory / file, tensors, {"format": "pt"})
        shards = {file: tensors for file, tensors in self.files.items() if file != SINGLE_FILE}
        if shards:
            (directory / INDEX).write_text(json.dumps(_index(shards), indent=2, sort_keys=True) + "\n")


def gpt2(seed: int = 0) -> Layout:
    """`GPT2LMHeadModel`: tied, the head not stored."""
    config = {
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": VOCABULARY - 1,
        "dtype": "float32",
        "embd_pdrop": 0.1,
        "eos_token_id": VOCABULARY - 1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 128,  # as in published checkpoints; transformers 5 no longer writes it, and llama.cpp needs it
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_inner": None,
        "n_layer": LAYERS,
        "n_positions": 128,
        "pad_token_id": None,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    shapes: Shapes = {"transformer.wpe.weight": (128, HIDDEN)}
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}."
        shapes |= _affine(f"{block}ln_1", HIDDEN) | _affine(f"{block}ln_2", HIDDEN)
        for module, inputs, outputs in (  # Conv1D: stored inputs first
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
            ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ):
            shapes |= _affine(block + module, outputs, inputs, outputs)
    shapes |= _affine("transformer.ln_f", HIDDEN)
    draw = np.random.default_rng([seed, 2])
    return _single(config, {"transformer.wte.weight": _table(draw, spread=0.14)} | _values(draw, shapes))


def bert(seed: int = 0) -> Layout:
    """`BertForMaskedLM`: tied, the output bias stored once as `cls.predictions.bias`, a trained padding row."""
    config = {
        "add_cross_attention": False,
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": None,
        "classifier_dropout": None,
        "dtype": "float32",
        "eos_token_id": None,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 4 * HIDDEN,
        "is_decoder": False,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 128,
        "model_type": "bert",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    shapes: Shapes = {
        "bert.embeddings.position_embeddings.weight": (128, HIDDEN),
        "bert.embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "cls.predictions.bias": (VOCABULARY,),
    }
    shapes |= _affine("bert.embeddings.LayerNorm", HIDDEN)
    for layer in range(LAYERS):
        block = f"bert.encoder.layer.{layer}."
        for module in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _affine(block + module, HIDDEN, HIDDEN, HIDDEN)
        shapes |= _affine(f"{block}attention.output.LayerNorm", HIDDEN)
        shapes |= _affine(f"{block}intermediate.dense", 4 * HIDDEN, 4 * HIDDEN, HIDDEN)
        shapes |= _affine(f"{block}output.dense", HIDDEN, HIDDEN, 4 * HIDDEN)
        shapes |= _affine(f"{block}output.LayerNorm", HIDDEN)
    shapes |= _affine("cls.predictions.transform.dense", HIDDEN, HIDDEN, HIDDEN)
    shapes |= _affine("cls.predictions.transform.LayerNorm", HIDDEN)
    draw = np.random.default_rng([seed, 3])
    table = {"bert.embeddings.word_embeddings.weight": _table(draw, spread=0.05)}
    return _single(config, table | _values(draw, shapes))


def t5_v1_0(seed: int = 0) -> Layout:
    """`T5ForConditionalGeneration` v1.0: encoder, decoder and head share one table; the logits are scaled."""
    config = _t5_config(d_ff=4 * HIDDEN, gated=False) | {
        "is_decoder": False,
        "scale_decoder_outputs": True,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
    }
    draw = np.random.default_rng([seed, 4])
    shapes = _t5_shapes(d_ff=4 * HIDDEN, inner=("wi",))
    return _single(config, {"shared.weight": _table(draw, spread=4.0)} | _values(draw, shapes))


def t5_v1_1(seed: int = 0) -> Layout:
    """T5 v1.1 as transformers 4 wrote it: gated, untied, with a separate head; the logits are not scaled."""
    config = _t5_config(d_ff=256, gated=True) | {"tie_word_embeddings": False, "transformers_version": "4.57.1"}
    draw = np.random.default_rng([seed, 5])
    tables = {"shared.weight": _table(draw, spread=4.0), "lm_head.weight": _table(draw, spread=1.0)}
    return _single(config, tables | _values(draw, _t5_shapes(d_ff=256, inner=("wi_0", "wi_1"))))


def llama(seed: int = 0, *, shards: bool = True) -> Layout:
    """`LlamaForCausalLM`: untied, with a separate head; two shards and an index, or one file."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    draw = np.random.default_rng([seed, 6])
    first: dict[str, Array] = {"model.embed_tokens.weight": _table(draw, spread=0.04)} | _values(draw, _llama_layer(0))
    last: dict[str, Array] = {"lm_head.weight": _table(draw, spread=0.05)} | _values(draw, _llama_layer(1))
    last |= _values(draw, {"model.norm.weight": (HIDDEN,)})
    if shards:
        return Layout(config=config, files=dict(zip(SHARDS, (first, last), strict=True)))
    return _single(config, first | last)


def _t5_config(*, d_ff: int, gated: bool) -> dict[str, Any]:
    """The config keys that both versions of transformers write for both versions of T5."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "classifier_dropout": 0.0,
        "d_ff": d_ff,
        "d_kv": HIDDEN // HEADS,
        "d_model": HIDDEN,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new" if gated else "relu",
        "dropout_rate": 0.1,
        "dtype": "float32",
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": gated,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "num_layers": LAYERS,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def _t5_shapes(*, d_ff: int, inner: tuple[str, ...]) -> Shapes:
    shapes: Shapes = {}
    for stack in ("encoder", "decoder"):
        for layer in range(LAYERS):
            block = f"{stack}.block.{layer}.layer."
            attentions = ("SelfAttention",) if stack == "encoder" else ("SelfAttention", "EncDecAttention")
            for at, attention in enumerate(attentions):
                shapes |= {f"{block}{at}.{attention}.{part}.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
                shapes[f"{block}{at}.layer_norm.weight"] = (HIDDEN,)
            if layer == 0:
                shapes[f"{block}0.SelfAttention.relative_attention_bias.weight"] = (32, HEADS)
            last = f"{block}{len(attentions)}."
            shapes |= {f"{last}DenseReluDense.{part}.weight": (d_ff, HIDDEN) for part in inner}
            shapes[f"{last}DenseReluDense.wo.weight"] = (HIDDEN, d_ff)
            shapes[f"{last}layer_norm.weight"] = (HIDDEN,)
        shapes[f"{stack}.final_layer_norm.weight"] = (HIDDEN,)
    return shapes


def _llama_layer(layer: int) -> Shapes:
    block = f"model.layers.{layer}."
    return {
        f"{block}input_layernorm.weight": (HIDDEN,),
        f"{block}mlp.down_proj.weight": (HIDDEN, 256),
        f"{block}mlp.gate_proj.weight": (256, HIDDEN),
        f"{block}mlp.up_proj.weight": (256, HIDDEN),
        f"{block}post_attention_layernorm.weight": (HIDDEN,),
        f"{block}self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        f"{block}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{block}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{block}self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    }


def _affine(module: str, outputs: int, *weight: int) -> Shapes:
    """The shapes of a module's weight and bias; without `weight`, those of a norm."""
    return {f"{module}.weight": weight or (outputs,), f"{module}.bias": (outputs,)}


def _values(draw: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    """Norm weights near one, everything else near zero."""
    values: dict[str, Array] = {}
    for name, shape in shapes.items():
        noise = (0.05 * draw.standard_normal(shape)).astype(np.float32)
        values[name] = noise + np.float32(1.0) if len(shape) == 1 and name.endswith("weight") else noise
    return values


def _table(draw: np.random.Generator, *, spread: float) -> Array:
    """A vocabulary table `(V, D)` as training leaves one: a decaying spectrum, a common direction, norms that spread.

    `spread` is the root mean square of an element, before the norms are spread.
    """
    rows = draw.standard_normal((VOCABULARY, HIDDEN)) * np.arange(1, HIDDEN + 1) ** -0.4
    rows += 0.1 * draw.standard_normal(HIDDEN)
    rows *= spread / np.sqrt(np.mean(rows**2))
    rows *= np.exp(0.2 * draw.standard_normal((VOCABULARY, 1)))
    table: Array = rows.astype(np.float32)
    return table


def _single(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Layout:
    return Layout(config=config, files={SINGLE_FILE: tensors})


def _index(shards: Files) -> dict[str, Any]:
    tensors = [tensor for shard in shards.values() for tensor in shard.values()]
    return {
        "metadata": {
            "total_parameters": sum(tensor.size for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
