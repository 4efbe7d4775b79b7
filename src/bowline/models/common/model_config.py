"""The base of the families' configurations: frozen dataclasses with the Hub's keys, and all other keys kept."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.strict_json import loads
from bowline.errors import ConfigError, UsageError

__all__ = ["PreTrainedConfig", "frozen"]

T = TypeVar("T")

ALWAYS = ("vocab_size", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id")
"""Keys that are written even at their defaults, because another reader's defaults may differ."""
MOST = 2**31 - 1
"""The largest size: no tensor has more rows, and torch can still represent the product of two such sizes."""
DEEPEST = 10_000
"""The largest number of layers."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a frozen dataclass in which only `use_cache` can be set, because transformers' Trainer sets it."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__setattr__ = _set  # type: ignore[method-assign]
    return made


def _set(self: Any, name: str, value: Any) -> None:
    if name != "use_cache":
        raise FrozenInstanceError(
            f"config.{name} cannot be set, because a config is immutable; "
            f"config.updated({name}=...) returns a changed copy"
        )
    object.__setattr__(self, name, value)


@frozen
class PreTrainedConfig:
    """The fields of all families. Keys and defaults are transformers'; keys without a field are kept in `extra`.

    `attribute_map` gives other names of a field (`hidden_size` for GPT-2's `n_embd`), for reading files and attributes.
    Configs are frozen; `config.updated(...)` makes a copy with other values. Only functions that change a model change
    its config in place: those that tie, untie, resize the vocabulary or prune heads.

    Raises:
        ConfigError: a size below 1, a padding token outside of the vocabulary, or a flag that is not true or false.
    """

    model_type: ClassVar[str] = ""
    attribute_map: ClassVar[Mapping[str, str]] = {}
    unsupported: ClassVar[Mapping[str, Any]] = {"add_cross_attention": False}
    """Keys of unsupported features, each with its one allowed value; other values are refused."""

    vocab_size: int
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    pad_logit: str = "keep"
    """With `"mask"` the padding token's logit is -inf in the loss and in generation, so that its row stays zero."""
    embed_scale: float = 1.0
    """The factor of looked-up embeddings. It belongs to the initialization: see `bowline.recipes`."""
    logit_scale: float = 1.0
    """A factor of the logits, in addition to the family's own scaling."""
    num_labels: int = 2
    problem_type: str | None = None
    pruned_heads: Mapping[int, list[int]] = field(default_factory=dict)
    use_cache: bool = True
    is_encoder_decoder: bool = False
    architectures: list[str] | None = None
    dtype: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_sizes("vocab_size", "num_labels")
        self.check_flags("tie_word_embeddings", "use_cache", "is_encoder_decoder")
        self.check_numbers("embed_scale", "logit_scale")
        if self.pad_logit not in ("keep", "mask"):
            self.refuse("pad_logit", "'keep' or 'mask'")
        if self.pad_logit == "mask" and self.pad_token_id is None:
            raise ConfigError(
                "config: pad_logit='mask' needs a pad_token_id, and there is none", help="set pad_token_id"
            )
        if self.pad_token_id is not None and not (_is_id(self.pad_token_id) and self.pad_token_id < self.vocab_size):
            self.refuse("pad_token_id", f"a token of the vocabulary, 0 to {self.vocab_size - 1}, or null")
        for name in ("bos_token_id", "decoder_start_token_id"):
            if getattr(self, name) is not None and not _is_id(getattr(self, name)):
                self.refuse(name, "a whole number from 0, or null")
        ends = self.eos_token_id if isinstance(self.eos_token_id, (list, tuple)) else [self.eos_token_id]
        if self.eos_token_id is not None and not all(map(_is_id, ends)):
            self.refuse("eos_token_id", "a whole number from 0, a list of them, or null")
        if not isinstance(self.pruned_heads, Mapping) or not all(
            _is_id(at) and isinstance(heads, (list, tuple)) and all(map(_is_id, heads))
            for at, heads in self.pruned_heads.items()
        ):
            self.refuse("pruned_heads", "{layer: heads}, all of them whole numbers from 0")
        for key, value in self.unsupported.items():
            if self.extra.get(key, value) != value:
                raise ConfigError(
                    f"config.{key} is {self.extra[key]!r:.60}, and Bowline's {self.model_type} supports only {value!r}",
                    help="use transformers for this model",
                )

    def check_sizes(self, *names: str) -> None:
        """Check that each is an integer from 1 to `MOST`. Larger sizes are refused before anything is built."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
                self.refuse(name, f"a whole number from 1 to {MOST}")

    def check_depth(self, *names: str) -> None:
        """Check that each is a number of layers from 1 to `DEEPEST`; layers are built one by one."""
        for name in names:
            self.check_sizes(name)
            if getattr(self, name) > DEEPEST:
                self.refuse(name, f"a number of layers from 1 to {DEEPEST}")

    def check_numbers(self, *names: str, low: float = 0.0, high: float = math.inf) -> None:
        """Check that each is a number from `low` to `high`, with `high=1.0` for dropout."""
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= min(high, 2.0**63):
                self.refuse(name, f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else ""))

    def check_heads(self, width: str, heads: str) -> None:
        """Check that the width is a multiple of the number of heads."""
        self.check_sizes(width, heads)
        if getattr(self, width) % getattr(self, heads):
            self.refuse(width, f"a multiple of {heads}, which is {getattr(self, heads)}")

    def check_flags(self, *names: str) -> None:
        """Check that each is true or false."""
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self.refuse(name, "true or false")

    def refuse(self, name: str, expected: str) -> None:
        """Raise a `ConfigError` about one key."""
        raise ConfigError(
            f"config.{name} is {getattr(self, name)!r:.60}, expected {expected}", help="correct the config"
        )

    def __getattr__(self, name: str) -> Any:
        target = type(self).attribute_map.get(name)
        if target is not None:
            return getattr(self, target)
        extra = self.__dict__.get("extra", {})
        if name in extra and not name.startswith("__"):  # a file must not change how its config is copied
            return extra[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def masked_ids(self) -> tuple[int, ...]:
        """The tokens whose logits are -inf."""
        return (self.pad_token_id,) if self.pad_logit == "mask" and self.pad_token_id is not None else ()

    def updated(self, **values: Any) -> Self:
        """Return a copy with other values, under any name that a key has in files.

        Raises:
            ConfigError: an invalid value.
            UsageError: a name that this config does not have.
        """
        known = {one.name for one in fields(self)} - {"extra"}
        changes: dict[str, Any] = {}
        extra = dict(self.extra)
        for key, value in values.items():
            name = self.attribute_map.get(key, key)
            if name not in known and key not in extra:
                close = get_close_matches(key, [*known, *self.attribute_map, *extra], n=3)
                raise UsageError(
                    f"{key}={value!r:.60}: {type(self).__name__} has no such key",
                    help=f"perhaps {' or '.join(close)}" if close else f"its keys are {', '.join(sorted(known))}",
                )
            (changes if name in known else extra)[name] = value
        return dataclasses.replace(self, extra=extra, **changes)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make the config from the content of a `config.json`.

        Raises:
            ConfigError: an invalid value, a missing required key, or one key under two names with different values.
        """
        if not isinstance(content, Mapping):
            raise ConfigError(f"a config of type {type(content).__name__}: expected an object {{key: value}}")
        known = {one.name for one in fields(cls)} - {"extra"}
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in content.items():
            name = cls.attribute_map.get(key, key)
            if name in values and values[name] != value:
                raise ConfigError(
                    f"config has {values[name]!r:.60} and {value!r:.60} as {name}; {key} is another name for it",
                    help="remove one of them",
                )
            (values if name in known else extra)[name if name in known else key] = value
        extra.pop("model_type", None)
        if "torch_dtype" in extra:  # the name of `dtype` before transformers 4.56
            values.setdefault("dtype", extra.pop("torch_dtype"))
        if isinstance(extra.get("id2label"), Mapping):
            values.setdefault("num_labels", len(extra["id2label"]))
        pruned = values.get("pruned_heads") or {}
        if isinstance(pruned, Mapping):  # JSON keys are strings
            values["pruned_heads"] = {int(at) if str(at).isdecimal() else at: heads for at, heads in pruned.items()}
        missing = [one.name for one in fields(cls) if _is_required(one) and one.name not in values]
        if missing:
            raise ConfigError(
                f"config has no {', '.join(missing)}", help=f"check that it is a config of {cls.model_type!r}"
            )
        try:
            return cls(**values, extra=extra)
        except TypeError as error:
            raise ConfigError(f"config of {cls.model_type!r}: {error}", help="correct the config") from None

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Read the config of a checkpoint: a directory, with or without weights, a file, or a Hub repository."""
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"path={path!r:.60}: expected a directory, a file or org/name")
        alone = Path(path) / "config.json" if Path(path).name != "config.json" else Path(path)
        if alone.is_file():
            content = loads(alone.read_bytes(), str(alone), allow_nonfinite=True)
            if not isinstance(content, Mapping):
                raise ConfigError(f"{alone}: expected a JSON object, got a {type(content).__name__}")
            return cls.from_dict(content)
        with open_checkpoint(path) as checkpoint:
            if checkpoint.config is None:
                raise ConfigError(f"{checkpoint.location}: no readable config.json", help="add one")
            return cls.from_dict(checkpoint.config)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`: the family's keys, other keys with a value of their own, and `extra`."""
        content: dict[str, Any] = {**copy.deepcopy(dict(self.extra)), "model_type": self.model_type}
        names = content.get("id2label")
        if isinstance(names, Mapping) and len(names) != self.num_labels:  # the names belong to another head
            content = {key: value for key, value in content.items() if key not in ("id2label", "label2id")}
        for one in fields(self):
            value = getattr(self, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if one.name != "extra" and (value != default or one.name in self.stated()):
                content[one.name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
        return content

    @classmethod
    def stated(cls) -> tuple[str, ...]:
        """Return the keys that are always written for this family."""
        base = {one.name for one in fields(PreTrainedConfig)}
        return (*ALWAYS, *(one.name for one in fields(cls) if one.name not in base))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `config.json` into `directory`, which is made if it does not exist."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(directory) / "config.json").write_text(text + "\n")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_required(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
