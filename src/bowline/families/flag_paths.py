"""The keys of a config that decide whether ties are made: the flag where it is stated, and what loaders read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bowline.families.declaration import Declaration
from bowline.families.resolver import FLAG, FLAGS

__all__ = ["flag_paths"]


def flag_paths(declaration: Declaration, config: Mapping[str, Any], targets: Collection[str]) -> list[str]:
    """The paths of the flags that affect the ties of `targets`, outermost first.

    Example:
        >>> from bowline.families.resolver import resolve
        >>> config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257}
        >>> flag_paths(resolve(config, {"wte.weight": (50257, 768)}), config, ["lm_head.weight"])
        ['tie_word_embeddings']
    """
    asked = [path for declared in declaration.ties if declared.tie.target in targets for path in declared.paths]
    flags = [path for path in asked if path.rpartition(".")[2] in FLAGS]
    stated = [
        path
        for path in declaration.levels
        if path == FLAG or path in flags or "vocab_size" in (_level(config, path) or {})
    ]
    present = [path for path in flags if _level(config, path) is not None]
    return sorted(dict.fromkeys([*stated, *present]), key=lambda path: path.count("."))


def _level(config: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    level: object = config
    for key in path.split(".")[:-1]:
        level = level.get(key) if isinstance(level, Mapping) else None
    return level if isinstance(level, Mapping) else None
