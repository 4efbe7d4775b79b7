"""The special ids that a config states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["special_ids"]

TEXT_LEVELS = ("text_config", "decoder", "encoder", "llm_config", "language_config")


def special_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Every `*_token_id` at the levels of a config that speak of text: dotted path to id.

    Example:
        >>> special_ids({"pad_token_id": 0, "eos_token_id": [2, 3], "text_config": {"bos_token_id": 1}})
        {'pad_token_id': 0, 'eos_token_id[0]': 2, 'eos_token_id[1]': 3, 'text_config.bos_token_id': 1}
    """
    found: dict[str, int] = {}
    for key, value in config.items():
        if key in TEXT_LEVELS and isinstance(value, Mapping):
            found.update({f"{key}.{path}": number for path, number in special_ids(value).items()})
        elif key.endswith("_token_id") and type(value) is int:
            found[key] = value
        elif key.endswith("_token_id") and isinstance(value, list):
            found.update({f"{key}[{at}]": one for at, one in enumerate(value) if type(one) is int})
    return found
