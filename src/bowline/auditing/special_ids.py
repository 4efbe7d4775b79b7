"""Lists the special token ids that a config states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bowline.families.config_levels import TEXT_LEVELS, config_levels

__all__ = ["special_ids"]


def special_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Every `*_token_id` at the levels of a config that describe text models: dotted path to id.

    Example:
        >>> special_ids({"pad_token_id": 0, "eos_token_id": [2, 3], "text_config": {"bos_token_id": 1}})
        {'pad_token_id': 0, 'eos_token_id[0]': 2, 'eos_token_id[1]': 3, 'text_config.bos_token_id': 1}
    """
    found: dict[str, int] = {}
    for keys, level in config_levels(config, is_level=_speaks_of_text):
        for key, value in level.items():
            path = ".".join((*keys, key))
            if key.endswith("_token_id") and type(value) is int:
                found[path] = value
            elif key.endswith("_token_id") and isinstance(value, list):
                found.update({f"{path}[{at}]": one for at, one in enumerate(value) if type(one) is int})
    return found


def _speaks_of_text(key: str, value: Any) -> bool:
    return key in TEXT_LEVELS and isinstance(value, Mapping)
