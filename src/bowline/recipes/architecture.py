"""The sizes, norms and multipliers that decide how signals pass through a new model, read from its config."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bowline.errors import ConfigError, UsageError
from bowline.families.quirks import ScaledBy, quirks_of
from bowline.recipes.config_directory import stored_config

__all__ = ["Architecture"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The facts about a language model that decide its loss before training.

    Args:
        family: the config's `model_type`.
        vocab_size: V.
        hidden_size: d.
        embedding_size: columns of the table; d unless it is factorised (ALBERT) or has a projection (LSTM).
        num_layers: L; the decoder's where there are two stacks.
        encoder_layers: layers of the encoder, 0 where there is none.
        num_heads: heads of the attention's queries.
        head_size: width of one head.
        intermediate_size: inner width of the feed-forward part.
        activation: of the feed-forward part.
        gated: whether the feed-forward part multiplies two products.
        post_norm: whether a norm stands behind each sum (BERT) or before each part.
        branch_norm: whether another norm stands behind each part, before it is added (Gemma 2 and 3).
        query_norm: whether queries and keys are normalised in each head (Qwen 3, Gemma 3).
        causal: whether a position sees only earlier positions.
        positions: whether positions have a table that is added to the embedding.
        token_types: whether token types have such a table.
        transform: whether the head has a layer of its own before its matrix (BERT).
        head_bias: whether the head has a bias.
        recurrent: whether the model is an LSTM.
        projected: whether a matrix stands between the last layer and the head (LSTM).
        score_scale: what attention scores are multiplied by.
        embed_scale: what looked-up embeddings are multiplied by.
        logit_scale: what logits are multiplied by.
        score_cap: the softcap c of attention scores, which become c tanh(score / c); `None` for no cap (Gemma 2).
        logit_cap: the softcap of the logits (Gemma 2).
        tied: whether the head is the table.
        initializer_range: the std from which transformers draws the model, if the config states it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int
    encoder_layers: int = 0
    num_heads: int = 1
    head_size: int = 1
    intermediate_size: int = 1
    activation: str = "gelu"
    gated: bool = False
    post_norm: bool = False
    branch_norm: bool = False
    query_norm: bool = False
    causal: bool = True
    positions: bool = False
    token_types: bool = False
    transform: bool = False
    head_bias: bool = False
    recurrent: bool = False
    projected: bool = False
    score_scale: float = 1.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    tied: bool = True
    initializer_range: float | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            _whole(name, getattr(self, name), 0 if name == "encoder_layers" else 1)
        for name in ("score_scale", "embed_scale", "logit_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{name} is {value!r:.60}, expected a finite number", help="correct the config")
        for name in ("initializer_range", "score_cap", "logit_cap"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))

    @property
    def sizes(self) -> dict[str, float]:
        """The sizes that a recipe's scales may depend on."""
        return {
            "hidden_size": self.hidden_size,
            "embedding_size": self.embedding_size,
            "head_size": self.head_size,
            "attention_size": self.num_heads * self.head_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "two_layers": 2 * self.num_layers,
        }

    def sizes_of(self, fan_in: int, fan_out: int) -> dict[str, float]:
        """`sizes`, and the fans of one matrix of the model."""
        return {**self.sizes, "fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}

    @classmethod
    def of(cls, model: Any) -> Architecture:
        """Read the facts from a model with a config, a config object, a `config.json`'s content or its directory.

        Of a model that holds a text model (Gemma 3 with images), the text model's facts. A flag that is absent means
        what it means in transformers: untied for Llama and its relatives, else tied.

        Raises:
            UsageError: a family that is not known here.
            ConfigError: a size that the config does not state, or no `config.json` in the directory.

        Example:
            >>> config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2}
            >>> Architecture.of(config).sizes["intermediate_size"]
            32
        """
        if isinstance(model, Architecture):
            return model
        stored = isinstance(model, (str, os.PathLike))
        config = outer = _Config(stored_config(model) if stored else getattr(model, "config", model))
        if not _known(config) and (text := config.get("text_config")) is not None and _known(_Config(text)):
            config = _Config(text)
        if not _known(config):
            what = os.fspath(model) if stored else type(model).__name__
            raise UsageError(
                f"{what} of the family {config.get('model_type', '')!r:.60}: expected one of {', '.join(_READERS)}",
                help="describe the model as a bowline.recipes.Architecture",
            )
        family = config["model_type"]
        read = _READERS[family](config)
        tied = outer.get("tie_word_embeddings", config.get("tie_word_embeddings", family not in _UNTIED))
        if not isinstance(tied, bool):
            raise ConfigError(f"tie_word_embeddings is {tied!r:.60}, expected true or false", help="correct the config")
        return replace(
            cls(
                family=family,
                vocab_size=config["vocab_size"],
                tied=tied,
                initializer_range=config.get("initializer_range"),
                **{"embedding_size": read["hidden_size"], **read},
            ),
            embed_scale=read.get("embed_scale", 1.0) * config.number("embed_scale"),
            logit_scale=read.get("logit_scale", 1.0) * config.number("logit_scale"),
        )


SIZES = (
    "vocab_size",
    "hidden_size",
    "embedding_size",
    "num_layers",
    "encoder_layers",
    "num_heads",
    "head_size",
    "intermediate_size",
)
MOST, MOST_LAYERS = 2**31 - 1, 10_000


def _whole(name: str, value: Any, least: int = 1) -> None:
    most = MOST_LAYERS if name.endswith(("layers", "layer")) else MOST
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{name} is {value!r:.60}, expected a whole number from {least} to {most}", help="correct the config"
        )


def _positive(name: str, value: Any) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (real and value > 0):
        raise ConfigError(f"{name} is {value!r:.60}, expected a number above 0", help="correct the config")
    return float(value)


class _Config:
    """Keys of a config, whether it is a mapping or an object."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def get(self, name: str, default: Any = None) -> Any:
        found = self.content.get(name) if isinstance(self.content, Mapping) else getattr(self.content, name, None)
        return default if found is None else found

    def cap(self, name: str, default: float | None) -> float | None:
        """A softcap, or `None` where the config says null; the default is for a config without the key."""
        content = self.content
        value = content.get(name, default) if isinstance(content, Mapping) else getattr(content, name, default)
        return None if value is None else _positive(name, value)

    def number(self, name: str) -> float:
        value = self.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} is {value!r:.60}, expected a number", help="correct the config")
        return float(value)

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise ConfigError(f"the config has no {name}", help="give the whole config of the model")
        if name == "hidden_act" and not isinstance(found, str):
            raise ConfigError(f"{name} is {found!r:.60}, expected a name", help="correct the config")
        if name not in ("hidden_act", "model_type"):
            _whole(name, found)
        return found


def _bert(config: _Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "head_size": size,
        "intermediate_size": config["intermediate_size"],
        "activation": config["hidden_act"],
        "post_norm": True,
        "causal": False,
        "positions": True,
        "token_types": True,
        "transform": True,
        "head_bias": True,
        "score_scale": size**-0.5,
    }


def _albert(config: _Config) -> dict[str, Any]:
    return {**_bert(config), "embedding_size": config["embedding_size"]}


def _gpt2(config: _Config) -> dict[str, Any]:
    width = config["n_embd"]
    size = width // config["n_head"]
    return {
        "hidden_size": width,
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "head_size": size,
        "intermediate_size": config.get("n_inner", 4 * width),
        "activation": config.get("activation_function", "gelu_new"),
        "positions": True,
        "score_scale": size**-0.5 if config.get("scale_attn_weights", True) else 1.0,
    }


def _t5(config: _Config) -> dict[str, Any]:
    kind = config.get("feed_forward_proj", "relu")
    match quirks_of(config["model_type"]).scaled_by[5]:
        case ScaledBy.NOTHING:
            scaled = True
        case ScaledBy.NEVER:
            scaled = False
        case _:
            scaled = config.get(ScaledBy.OWN_KEY.value, config.get("tie_word_embeddings", True))
    return {
        "hidden_size": config["d_model"],
        "num_layers": config.get("num_decoder_layers", config["num_layers"]),
        "encoder_layers": config["num_layers"],
        "num_heads": config["num_heads"],
        "head_size": config["d_kv"],
        "intermediate_size": config["d_ff"],
        "activation": kind.removeprefix("gated-"),
        "gated": kind.startswith("gated-"),
        "logit_scale": config["d_model"] ** -0.5 if scaled else 1.0,
    }


def _llama(config: _Config) -> dict[str, Any]:
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "head_size": size,
        "intermediate_size": config["intermediate_size"],
        "activation": config.get("hidden_act", "silu"),
        "gated": True,
        "score_scale": size**-0.5,
    }


def _gemma(config: _Config) -> dict[str, Any]:
    activation = config.get("hidden_activation", config.get("hidden_act", "gelu_pytorch_tanh"))
    return {**_llama(config), "activation": activation, "embed_scale": math.sqrt(config["hidden_size"])}


def _qwen3(config: _Config) -> dict[str, Any]:
    return {**_llama(config), "query_norm": True}


def _gemma2(config: _Config) -> dict[str, Any]:
    return {
        **_gemma(config),
        "branch_norm": True,
        "score_scale": _by_query_scalar(config, 256),
        "score_cap": config.cap("attn_logit_softcapping", 50.0),
        "logit_cap": config.cap("final_logit_softcapping", 30.0),
    }


def _gemma3(config: _Config) -> dict[str, Any]:
    read = _gemma(config)
    return {
        **read,
        "branch_norm": True,
        "query_norm": True,
        "score_scale": _by_query_scalar(config, read["head_size"]),
        "score_cap": config.cap("attn_logit_softcapping", None),
        "logit_cap": config.cap("final_logit_softcapping", None),
    }


def _by_query_scalar(config: _Config, default: int) -> float:
    return 1 / math.sqrt(_positive("query_pre_attn_scalar", config.get("query_pre_attn_scalar", default)))


def _lstm(config: _Config) -> dict[str, Any]:
    width, inner = config.get("embedding_size", config["hidden_size"]), config["hidden_size"]
    projected = config.get("projection", inner != width)
    return {
        "hidden_size": inner,
        "embedding_size": width,
        "num_layers": config["num_layers"],
        "recurrent": True,
        "projected": projected,
        "head_bias": config.get("head_bias", True),
    }


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "bert": _bert,
    "albert": _albert,
    "gpt2": _gpt2,
    "t5": _t5,
    "mt5": _t5,
    "umt5": _t5,
    "longt5": _t5,
    "lstm": _lstm,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
_UNTIED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose head transformers unties if the config says nothing."""


def _known(config: _Config) -> bool:
    family = config.get("model_type")
    return isinstance(family, str) and family in _READERS
