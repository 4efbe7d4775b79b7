"""Keys of configs that hold token ids, and the translation of their values when tokens move or go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bowline.errors import UsageError

__all__ = ["TOKEN_IDS", "TokenMoves", "named_tokens"]

TOKEN_IDS = re.compile(
    r"(?!(?:t2u|codec|codebook|tts_codec|num|max|min|default)_)"
    r"(?:\w*token_ids?|\w*token_index|(?:unk|mask|pad|bos|eos)_index"
    r"|(?:im|image|slice)_(?:start|end|newline)_id|newline_id|image_patch_id"
    r"|(?:begin_)?suppress_tokens|bad_words_ids|force_words_ids|forced_decoder_ids|sequence_bias|vocabulary_map"
    r"|lang_to_id|task_to_id|task_specific_params)"
)
"""Keys of configs and attributes of modules that hold token ids."""
DROPPED = -1
"""The new id of a token that goes."""


Translate = Callable[[int, str], int]
"""The new id of a token that the config names at the place of this name."""


class TokenMoves:
    """The tokens that get another id, `changed` (old to new), with `DROPPED` for one that goes.

    `way_out` is the help of the error about a dropped token that a config names, made of the token and the place.
    """

    def __init__(self, changed: Mapping[int, int], way_out: Callable[[int, str], str]) -> None:
        self.changed = changed
        self._way_out = way_out

    def __call__(self, key: str, value: Any, where: str) -> Any:
        """The value of a `key` of `TOKEN_IDS`, with its ids translated.

        Raises:
            UsageError: one of them is dropped; `where` names the place that uses it.

        Example:
            >>> moves = TokenMoves({7: 3, 8: -1}, lambda token, where: f"keep {token}")
            >>> moves("eos_token_id", [7, 2], "config.eos_token_id")
            [3, 2]
        """
        return _translated(key, value, where, self._translate)

    def _translate(self, token: int, where: str) -> int:
        new = self.changed.get(token, token)
        if new == DROPPED:
            raise UsageError(f"{where} is token {token}, which would be dropped", help=self._way_out(token, where))
        return new


def named_tokens(level: Mapping[str, Any]) -> dict[int, str]:
    """Each token id that one level of a config names, with the first key that names it.

    Example:
        >>> named_tokens({"eos_token_id": [1, 2], "vocab_size": 9})
        {1: 'eos_token_id', 2: 'eos_token_id'}
    """
    found: dict[int, str] = {}

    def note(token: int, where: str) -> int:
        if token >= 0:
            found.setdefault(token, where)
        return token

    for key, value in level.items():
        if isinstance(key, str) and TOKEN_IDS.fullmatch(key):
            _translated(key, value, key, note)
    return found


def _translated(key: str, value: Any, where: str, translate: Translate) -> Any:
    if key == "task_specific_params" and isinstance(value, Mapping):
        return {task: _settings(one, f"{where}[{task!r}]", translate) for task, one in value.items()}
    if key == "forced_decoder_ids" and isinstance(value, (list, tuple)):  # pairs of a position and a token
        return type(value)([place, _ids(token, where, translate)] for place, token in value)
    if key == "sequence_bias" and isinstance(value, (list, tuple)):
        return type(value)([_ids(sequence, where, translate), bias] for sequence, bias in value)
    if key == "sequence_bias" and isinstance(value, Mapping):
        return {_ids(sequence, where, translate): bias for sequence, bias in value.items()}
    return _ids(value, where, translate)


def _settings(task: Any, where: str, translate: Translate) -> Any:
    """A task's settings, with the keys of a config, ids translated."""
    if not isinstance(task, Mapping):
        return task
    return {
        key: _translated(key, value, f"{where}[{key!r}]", translate) if TOKEN_IDS.fullmatch(str(key)) else value
        for key, value in task.items()
    }


def _ids(value: Any, where: str, translate: Translate) -> Any:
    """Translates ids at any depth of a value."""
    if isinstance(value, Mapping):
        return {key: _ids(one, f"{where}[{key!r}]", translate) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_ids(one, where, translate) for one in value)
    return translate(value, where) if type(value) is int else value
