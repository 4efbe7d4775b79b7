"""Reads the ids and the special tokens from the tokenizer's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.errors import CheckpointError

__all__ = ["TokenizerFacts", "read_tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """The ids that a tokenizer can produce. `problems` maps each of its files that cannot be read to the reason."""

    ids: Mapping[str, int]
    files: tuple[str, ...]
    largest_id: int | None
    added: frozenset[int] = frozenset()
    """Ids of tokens that were added to the vocabulary, not trained into it."""
    special: Mapping[str, str] = field(default_factory=dict)
    """The special tokens by role, as `special_tokens_map.json` or `tokenizer_config.json` names them:
    `{"pad_token": "[PAD]"}`."""
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def largest_token(self) -> str | None:
        """The token of the largest id."""
        return next((token for token, number in self.ids.items() if number == self.largest_id), None)

    @property
    def size(self) -> int:
        """The number of rows that a table needs to hold every id: the largest id plus one."""
        return 0 if self.largest_id is None else self.largest_id + 1


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerFacts | None:
    """The tokenizer beside the weights, or in a GGUF file, or `None`.

    A malformed file is recorded in `problems` and raises no error.
    """
    if checkpoint.gguf is not None:
        return _tokens_of_gguf(checkpoint, checkpoint.gguf.file)
    ids: dict[str, int] = {}
    added_ids: set[int] = set()
    files: list[str] = []
    problems: dict[str, str] = {}
    special: dict[str, str] = {}

    def read(name: str) -> Any:
        try:
            return checkpoint.json(name)
        except CheckpointError as error:
            problems[name] = error.message
            return None

    content = read("tokenizer.json")
    if isinstance(content, dict):
        files.append("tokenizer.json")
        ids.update(_ids_of_tokenizer(content))
        added_ids.update(number for _, number in _added_tokens(content))
    else:
        vocabulary = read("vocab.json")
        if isinstance(vocabulary, dict):
            files.append("vocab.json")
            ids.update(_counted(vocabulary.items()))
    added = read("added_tokens.json")
    if isinstance(added, dict):
        files.append("added_tokens.json")
        added_ids.update(number for _, number in _counted(added.items()))
        ids.update(_counted(added.items()))
    named = read("special_tokens_map.json")
    if isinstance(named, dict):
        files.append("special_tokens_map.json")
        special = {part: text for part, value in named.items() if (text := _text(value)) is not None}
    if not files and not problems:
        return None
    settings = read("tokenizer_config.json")
    if isinstance(settings, dict):
        named = {part: text for part, value in settings.items() if (text := _text(value)) is not None}
        special = {part: text for part, text in named.items() if part.endswith("_token")} | special
    largest = max(ids, key=lambda token: ids[token], default=None)
    return TokenizerFacts(
        ids=ids,
        files=tuple(files),
        largest_id=None if largest is None else ids[largest],
        added=frozenset(added_ids),
        special=special,
        problems=problems,
    )


def _tokens_of_gguf(checkpoint: Checkpoint, file: str) -> TokenizerFacts | None:
    """The tokens in a GGUF file's metadata, which are decoded when a finding first needs one."""
    try:
        tokens = checkpoint.token_ids()
    except CheckpointError as error:
        return TokenizerFacts(ids={}, files=(), largest_id=None, problems={file: error.message})
    if tokens is None:
        return None
    return TokenizerFacts(ids=tokens, files=(file,), largest_id=tokens.length - 1 if tokens.length else None)


def _ids_of_tokenizer(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from _counted(vocabulary.items())
    elif isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of their ids
        for position, pair in enumerate(vocabulary):
            if isinstance(pair, list) and pair and isinstance(pair[0], str):
                yield pair[0], position
    yield from _added_tokens(content)


def _added_tokens(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            yield from _counted([(token.get("content"), token.get("id"))])


def _counted(pairs: Any) -> Iterator[tuple[str, int]]:
    for token, number in pairs:
        if isinstance(token, str) and isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            yield token, number


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
