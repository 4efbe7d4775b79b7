"""The levels of a config: the config itself and the configs inside it, whether they are mappings or objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["TEXT_LEVELS", "config_levels"]

TEXT_LEVELS = ("text_config", "decoder", "encoder", "llm_config", "language_config")
"""The keys under which configs keep a config of text: those of transformers, and those of InternVL and DeepSeek-VL."""
DEEPEST = 8
"""Levels below the outermost one that are visited; a config may be as deep as JSON allows, and may be hostile."""

Keys = tuple[str, ...]


def config_levels(
    config: Any,
    *,
    is_level: Callable[[str, Any], bool] | None = None,
    members: Callable[[Any], Iterable[tuple[str, Any]]] | None = None,
) -> Iterator[tuple[Keys, Any]]:
    """Each level of a config, outermost first, with the keys that lead to it.

    A member is a level if `is_level` says so of its key and value (default: every mapping is one). `members` lists the
    keys and values of a level (default: those of a mapping).

    Example:
        >>> config = {"text_config": {"rope": {}}, "vocab_size": 9}
        >>> [keys for keys, _ in config_levels(config)]
        [(), ('text_config',), ('text_config', 'rope')]
        >>> [keys for keys, _ in config_levels(config, is_level=lambda key, value: key in TEXT_LEVELS)]
        [(), ('text_config',)]
    """
    return _below(config, (), is_level or _is_mapping, members or _items)


def _below(
    config: Any,
    keys: Keys,
    is_level: Callable[[str, Any], bool],
    members: Callable[[Any], Iterable[tuple[str, Any]]],
) -> Iterator[tuple[Keys, Any]]:
    yield keys, config
    if len(keys) < DEEPEST:
        for key, value in members(config):
            if is_level(key, value):
                yield from _below(value, (*keys, str(key)), is_level, members)


def _is_mapping(_key: str, value: Any) -> bool:
    return isinstance(value, Mapping)


def _items(config: Any) -> Iterable[tuple[str, Any]]:
    return config.items()  # type: ignore[no-any-return]
