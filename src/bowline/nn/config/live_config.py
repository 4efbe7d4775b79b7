"""Reads and writes `tie_word_embeddings` in a live config, at every level that has it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, is_dataclass
from typing import Any

from torch import nn

from bowline.families.config_levels import config_levels
from bowline.families.quirks import ScaledBy, quirks_of
from bowline.families.resolver import FLAG

__all__ = [
    "FLAG",
    "flag_is_forced",
    "flag_of",
    "live_configs",
    "owner",
    "restore",
    "scaled_by",
    "set_flag",
    "text_config",
    "write",
]


def flag_of(config: Any) -> bool | None:
    """The flag at one level, or `None` if the level does not state it."""
    value = config.get(FLAG) if isinstance(config, Mapping) else getattr(config, FLAG, None)
    return None if value is None else bool(value)


def text_config(config: Any) -> Any:
    """The level that transformers 4 reads: the text decoder's."""
    find = getattr(config, "get_text_config", None)
    if find is None:
        return config
    try:
        return find(decoder=True)
    except ValueError:  # several candidates, and transformers will not choose
        return config


def levels(config: Any) -> Iterator[tuple[str, Any]]:
    """`config` and every config inside it, outermost first: dotted path (`""` for the root) and object."""
    for keys, level in config_levels(config, is_level=_is_level, members=_members):
        yield ".".join(keys), level


def _members(config: Any) -> Iterable[tuple[str, Any]]:
    members: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return members.items()


def _is_level(key: str, value: Any) -> bool:
    if key.startswith("_"):
        return False
    if isinstance(value, Mapping):
        return FLAG in value or "model_type" in value
    return hasattr(value, FLAG) or (is_dataclass(value) and not isinstance(value, type))


def live_configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every config that a module of `model` holds, each object once: where it hangs, and the object.

    The encoder and decoder of a T5, for instance, hold copies of the model's own.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        config = module.__dict__.get("config")
        if config is None:
            continue
        for path, level in levels(config):
            if id(level) not in seen:
                seen.add(id(level))
                yield ".".join(part for part in (prefix, "config", path) if part), level


def owner(model: nn.Module) -> nn.Module:
    """The outermost module that has a config: what people wrap around a model has none."""
    return next((module for module in model.modules() if module.__dict__.get("config") is not None), model)


def set_flag(model: nn.Module, value: bool) -> list[tuple[Any, bool]]:
    """Make the flag `value`; returns what it was, for `restore`.

    False is written at every level that states the flag, unless its class makes the flag true at every load and its
    model's `forward` asks the flag: the live model would differ from the one that is loaded again. True is written at
    the root and at the text decoder's level, and not at the levels of towers that have no words.
    """
    root = getattr(owner(model), "config", None)
    if value:
        wanted = {id(root), id(text_config(root))} if root is not None else set()
        wanted |= {id(module.__dict__["config"]) for module in model.modules() if _declares(module)}
    before: list[tuple[Any, bool]] = []
    try:
        for _, level in live_configs(model):
            stated = flag_of(level)
            may = id(level) in wanted if value else scaled_by(level) is not ScaledBy.NOTHING
            if may and stated is not None and stated != value:
                write(level, FLAG, value)
                before.append((level, stated))
    except BaseException:  # a level that cannot be written: all or nothing
        restore(before)
        raise
    return before


def restore(before: list[tuple[Any, bool]]) -> None:
    """Undo `set_flag`."""
    for level, value in before:
        write(level, FLAG, value)


def _declares(module: nn.Module) -> bool:
    return bool(getattr(module, "_tied_weights_keys", None)) and module.__dict__.get("config") is not None


def write(level: Any, key: str, value: Any) -> None:
    """Set one key of a config: a mapping, an object, or a frozen dataclass, which the model that has it may change."""
    if isinstance(level, dict):
        level[key] = value
        return
    try:
        setattr(level, key, value)
    except FrozenInstanceError:
        object.__setattr__(level, key, value)


def scaled_by(config: Any) -> ScaledBy | None:
    """What decides whether a model with this config scales its head's input, in the loaded version of transformers.

    `None` where transformers is not loaded or the family has no such scale. A config class from elsewhere that has the
    key for the scale (Bowline's own T5) asks that key in every version.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    known = quirks_of(getattr(config, "model_type", None)).scaled_by
    theirs = any(cls.__module__.partition(".")[0] == "transformers" for cls in type(config).__mro__)
    if known and not theirs and hasattr(config, ScaledBy.OWN_KEY.value):
        return ScaledBy.OWN_KEY
    return known.get(int(transformers.__version__.partition(".")[0]))


def flag_is_forced(config: Any) -> bool:
    """Whether the config's class makes the flag true whatever `config.json` says, as T5's does in transformers 5."""
    try:
        return flag_of(type(config).from_dict({**config.to_dict(), FLAG: False})) is True
    except (AttributeError, TypeError, ValueError):
        return False
