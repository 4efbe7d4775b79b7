"""The one walk over the levels of a config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bowline.auditing.special_ids import special_ids
from bowline.families.config_levels import config_levels
from bowline.families.resolver import stated_levels
from bowline.nn.config.live_config import levels

FLAG = "tie_word_embeddings"


def deep(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {FLAG: True, "pad_token_id": 3}
    for _ in range(depth):
        config = {"text_config": config, FLAG: True, "pad_token_id": 3}
    return config


def live(depth: int) -> SimpleNamespace:
    inner = {} if depth == 0 else {"text_config": live(depth - 1)}
    return SimpleNamespace(tie_word_embeddings=True, **inner)


def test_a_level_comes_before_the_levels_inside_it() -> None:
    config: dict[str, Any] = {"b": {"c": {}}, "a": {}}
    assert [keys for keys, _ in config_levels(config)] == [(), ("b",), ("b", "c"), ("a",)]


def test_a_key_with_a_dot_or_without_a_letter_is_one_key() -> None:
    assert [keys for keys, _ in config_levels({"": {"a.b": {}}})] == [(), ("",), ("", "a.b")]


def test_every_reader_of_a_config_stops_at_the_same_depth() -> None:
    nested = deep(100)
    visited = len(list(config_levels(nested)))
    assert visited == len(stated_levels(nested)) == len(special_ids(nested)) == len(list(levels(live(100)))) == 9
