"""A family's configuration: the Hub's keys as a frozen dataclass, and whatever else the file holds beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from bowline.checkpoint import open_checkpoint
from bowline.errors import ConfigError

__all__ = ["PreTrainedConfig"]

ALWAYS = ("vocab_size", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id")
"""Keys that a file states even where they have their defaults: another reader's defaults may differ."""


@dataclass(frozen=True, kw_only=True)
class PreTrainedConfig:
    """What all families have. Keys and defaults are transformers'; a key that no field stands for is kept in `extra`.

    `attribute_map` gives other names of a field (`hidden_size` of GPT-2's `n_embd`), for reading files and attributes.
    Frozen: a copy with other values is `dataclasses.replace(config, ...)`. Only what changes a model changes its config
    in place: ties made or undone, a vocabulary resized, heads pruned.

    Raises:
        ConfigError: a size below 1, a token id outside of the vocabulary, a flag that is no truth value.
    """

    model_type: ClassVar[str] = ""
    attribute_map: ClassVar[Mapping[str, str]] = {}
    unsupported: ClassVar[Mapping[str, Any]] = {"add_cross_attention": False}
    """Keys that are known and not built, each with the one value that is right: another is refused, not ignored."""

    vocab_size: int
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    pad_logit: str = "keep"
    """`"mask"`: the padding token's logit is -inf, in the loss and in generation, so that its row stays zero."""
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
        if not isinstance(self.tie_word_embeddings, bool):
            self.refuse("tie_word_embeddings", "true or false")
        if self.pad_logit not in ("keep", "mask"):
            self.refuse("pad_logit", "'keep' or 'mask'")
        if self.pad_logit == "mask" and self.pad_token_id is None:
            raise ConfigError("config: pad_logit='mask' and no pad_token_id", help="set pad_token_id")
        if self.pad_token_id is not None and not (
            isinstance(self.pad_token_id, int) and 0 <= self.pad_token_id < self.vocab_size
        ):
            self.refuse("pad_token_id", f"a token of the vocabulary, 0 to {self.vocab_size - 1}, or null")

        for key, value in self.unsupported.items():
            if self.extra.get(key, value) != value:
                raise ConfigError(
                    f"config.{key} is {self.extra[key]!r:.60}, and Bowline's {self.model_type} has only {value!r}",
                    help="use transformers for this model",
                )

    def check_sizes(self, *names: str) -> None:
        """Each of them a whole number from 1."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self.refuse(name, "a whole number from 1")

    def check_heads(self, width: str, heads: str) -> None:
        """The width a multiple of the number of heads."""
        self.check_sizes(width, heads)
        if getattr(self, width) % getattr(self, heads):
            self.refuse(width, f"a multiple of {heads}, which is {getattr(self, heads)}")

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
        if name in extra:
            return extra[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def masked_ids(self) -> tuple[int, ...]:
        """The tokens whose logits are -inf."""
        return (self.pad_token_id,) if self.pad_logit == "mask" and self.pad_token_id is not None else ()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The config that a `config.json` describes.

        Raises:
            ConfigError: a value that means nothing, or a required key that is missing.
        """
        known = {one.name for one in fields(cls)} - {"extra"}
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in content.items():
            name = cls.attribute_map.get(key, key)
            (values if name in known else extra)[name if name in known else key] = value
        extra.pop("model_type", None)
        if "torch_dtype" in extra:  # its name before transformers 4.56
            values.setdefault("dtype", extra.pop("torch_dtype"))
        if isinstance(extra.get("id2label"), Mapping):
            values.setdefault("num_labels", len(extra["id2label"]))
        values["pruned_heads"] = {int(at): list(heads) for at, heads in (values.get("pruned_heads") or {}).items()}
        missing = [one.name for one in fields(cls) if _is_required(one) and one.name not in values]
        if missing:
            raise ConfigError(f"config has no {', '.join(missing)}", help=f"is it a config of {cls.model_type!r}?")
        try:
            return cls(**values, extra=extra)
        except TypeError as error:
            raise ConfigError(f"config of {cls.model_type!r}: {error}", help="correct the config") from None

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """The config of a checkpoint: a directory, a file of one, or a Hub repository."""
        with open_checkpoint(path) as checkpoint:
            if checkpoint.config is None:
                raise ConfigError(f"{checkpoint.location}: no config.json that can be read", help="add one")
            return cls.from_dict(checkpoint.config)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`: every key of the family, what differs from the other defaults, and `extra`."""
        content: dict[str, Any] = {**self.extra, "model_type": self.model_type}
        for one in fields(self):
            value = getattr(self, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if one.name != "extra" and (value != default or one.name in self.stated()):
                content[one.name] = value
        return content

    @classmethod
    def stated(cls) -> tuple[str, ...]:
        """The keys that a file of this family states always."""
        base = {one.name for one in fields(PreTrainedConfig)}
        return (*ALWAYS, *(one.name for one in fields(cls) if one.name not in base))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `config.json` into `directory`."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(directory) / "config.json").write_text(text + "\n")


def _is_required(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
