"""Describes a class to llama.cpp: the names, layout and shapes of its tensors, and its keys.

Read off llama.cpp's converter and its loader; the test of real models holds both against what is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.tensor_shapes import TensorShapes

__all__ = ["CONVERTER", "Config", "GGUFArchitecture", "Stack", "expect", "number_in", "positive_in", "size_in"]

Config = Mapping[str, Any]
NEVER = re.compile(r"(?!)")
NUMBERED = re.compile(r"(\d+)\.(.*)")
LARGEST_SIZE = (1 << 31) - 1
LARGEST = 3.4e38
"""About the largest float32."""
CONVERTER = "convert the model with llama.cpp's own convert_hf_to_gguf.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Numbered layers: what stands before a layer's number in the checkpoint and in GGUF, and the names in a layer.

    `names` are without `.weight` or `.bias`.
    """

    stored: str
    written: str
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """One architecture of llama.cpp: its name there, the names of its tensors, and its keys.

    `names` are tensors outside of layers, without `.weight` or `.bias`. Several names can become one tensor: then all
    have to be equal.
    """

    name: str
    prefix: str
    names: Mapping[str, str]
    stacks: tuple[Stack, ...]
    keys: Callable[[Config], dict[str, bytes]]
    shapes: Callable[[Config], TensorShapes]
    """The tensors that llama.cpp reads, without `output.weight`."""
    interleaved: tuple[str, ...] = ()
    """Layers whose rows llama.cpp wants in the order of interleaved rotary embeddings."""
    transposed: tuple[str, ...] = ()
    """Layers that transformers stores transposed."""
    one_less: re.Pattern[str] = NEVER
    """Tensors that are stored less one, and that llama.cpp wants as they count."""
    ignored: re.Pattern[str] = NEVER
    single: re.Pattern[str] = NEVER
    """Matrices that llama.cpp reads in float32 only."""
    has_head: bool = True
    """Whether llama.cpp reads `output.weight`; if not, it takes the embedding for both ends of every model."""
    last_norm: str = "output_norm.weight"
    """The weights of the norm in front of the head."""
    notes: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Sentences for the report about settings that llama.cpp follows in part."""

    def target(self, stored: str) -> str | None:
        """llama.cpp's name of a stored tensor; `None` if it has no use for it."""
        if self.ignored.fullmatch(stored):
            return None
        bare = stored.removeprefix(self.prefix)
        stem, _, attribute = bare.rpartition(".")
        if stem in self.names:
            return f"{self.names[stem]}.{attribute}"
        stack, number, layer = self._placed(stem)
        if stack is not None and layer in stack.names:
            return f"{stack.written}.{number}.{stack.names[layer]}.{attribute}"
        raise UsageError(f"{shown(stored)}: llama.cpp's {self.name} has no place for this tensor", help=CONVERTER)

    def layer(self, stored: str) -> str:
        """What follows the layer's number in a stored name, without its last part; empty outside of layers."""
        return self._placed(stored.removeprefix(self.prefix).rpartition(".")[0])[2]

    def _placed(self, stem: str) -> tuple[Stack | None, str, str]:
        """The stack of a layer, the layer's number, and what follows it."""
        for stack in self.stacks:
            inner = NUMBERED.fullmatch(stem[len(stack.stored) :]) if stem.startswith(stack.stored) else None
            if inner is not None:
                return stack, inner[1], inner[2]
        return None, "", ""

    def heads(self, layer: str, config: Config) -> int:
        """The heads of an interleaved layer."""
        own = "num_key_value_heads" if layer.endswith("k_proj") else "num_attention_heads"
        return int(config.get(own) or config["num_attention_heads"])


def size_in(config: Config, key: str, default: int | None = None) -> int:
    """A size in `config.json`, or the default where it is missing or null.

    Raises:
        UsageError: it is not a whole number from 1 to the largest int32.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value <= LARGEST_SIZE:
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected a whole number from 1 to {LARGEST_SIZE}",
            help="set it to the model's own size, or fetch config.json again",
        )
    return value


def number_in(config: Config, key: str, default: float) -> float:
    """A number in `config.json`, or the default where it is missing.

    Raises:
        UsageError: it is not a number from 0 to the largest float32.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected a finite number from 0",
            help="set it to the model's own, or fetch config.json again",
        )
    return float(value)


def positive_in(settings: Config, key: str, default: float | None = None) -> float:
    """A number above 0 in `config.json`, or the default where it is missing or null.

    Raises:
        UsageError: it is not a number above 0, or is above 1e30.
    """
    value = default if settings.get(key) is None else settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected a positive number",
            help="set it to the model's own, or fetch config.json again",
        )
    return float(value)


def expect(config: Config, key: str, known: Sequence[Any], *, default: Any) -> None:
    """Check a setting of which llama.cpp knows some values only. Raises `UsageError` if it has another."""
    value = config.get(key, default)
    if not any(value is one or (value == one and type(value) is type(one)) for one in known):
        wanted = " or ".join(shown(one) for one in known)
        raise UsageError(
            f"config.json: {key} is {shown(value)}, expected {wanted}: llama.cpp computes nothing else for this class",
            help="run the model in transformers or vLLM",
        )
