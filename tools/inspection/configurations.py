"""Configurations as dictionaries: nested levels, dotted paths of keys, and the flags that decide ties."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import transformers

from tools.tiny import Json, config_from_dict

FLAG = "tie_word_embeddings"
OTHER_SWITCHES = {
    "csm": ["tie_codebooks_embeddings"],
    "lfm2": ["tie_embedding"],
    "lfm2_moe": ["tie_embedding"],
    "lfm2_vl": ["tie_embedding"],
    "marian": ["share_encoder_decoder_embeddings"],
}
"""Keys beside the flag that some families read, at the level with that `model_type`."""


def levels(content: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """The configuration and every configuration inside it, each with its dotted path ("" for the top)."""
    yield prefix, content
    for key, value in content.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from levels(value, f"{prefix}.{key}" if prefix else key)


def integer_paths(content: Json) -> dict[str, int]:
    """Every integer of the configuration, at every level, by its dotted path."""
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, level in levels(content)
        for key, value in level.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def is_vocabulary_key(path: str) -> bool:
    """Whether a key may hold the size of a vocabulary, judged by its name."""
    key = path.rpartition(".")[2]
    return bool(re.search(r"vocab|^n_tokens?$|^num_tokens$", key)) and "type_vocab" not in key


def changed(content: Json, path: str, value: Any) -> Json:
    """A copy of `content` with another value at a dotted path."""
    content = copy.deepcopy(content)
    *parents, key = path.split(".")
    level = content
    for parent in parents:
        level = level[parent]
    level[key] = value
    return content


def switches(content: Json) -> list[str]:
    """Paths of the keys that may decide a tie: the flag at the top and at each level with words, and its relatives."""
    found = [FLAG]
    for prefix, level in levels(content):
        has_words = "vision" not in prefix and any(is_vocabulary_key(key) for key in level)
        if prefix and has_words and (FLAG in level or "text" in prefix):
            found.append(f"{prefix}.{FLAG}")
    for prefix, level in levels(content):
        others = OTHER_SWITCHES.get(level.get("model_type", ""), [])
        found += [f"{prefix}.{key}" if prefix else key for key in others]
    return found


def with_switches(content: Json, setting: dict[str, bool | None]) -> Json:
    """`content` without any flag at any level, then with the flags of `setting` that are not None."""
    content = copy.deepcopy(content)
    for _, level in levels(content):
        level.pop(FLAG, None)
    for path, value in setting.items():
        *parents, key = path.split(".")
        level = content
        for parent in parents:
            level = level[parent]
        level.pop(key, None)
        if value is not None:
            level[key] = value
    return content


def default_flags(config: Any, prefix: str = "") -> Json:
    """{path of the flag: [its default value or None, whether its level has a vocabulary]}, at every level."""
    path = f"{prefix}.{FLAG}" if prefix else FLAG
    found: Json = {path: [getattr(config, FLAG, None), any(is_vocabulary_key(key) for key in vars(config))]}
    for key, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            found |= default_flags(value, f"{prefix}.{key}" if prefix else key)
    return found


def flat(cls: type[Any], content: Json) -> Json | None:
    """`content` in an older layout, the text model's keys at the top; None if the family does not read that layout."""
    text = content.get("text_config")
    if not isinstance(text, dict) or "vocab_size" not in text or "vocab_size" in content:
        return None
    merged = text | {key: value for key, value in content.items() if key != "text_config"}
    try:
        config = config_from_dict(cls.config_class, merged)
    except Exception:
        return None
    read = [config.get_text_config().to_dict().get(key) for key in ("vocab_size", "hidden_size")]
    return merged if read == [text["vocab_size"], text.get("hidden_size")] else None
