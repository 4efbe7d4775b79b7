"""Reads the ids and the special tokens from the tokenizer's files, and compares two files of one vocabulary."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.errors import CheckpointError, FormatError

__all__ = ["TokenizerFacts", "VocabularyDifference", "read_tokenizer"]

SENTENCEPIECE, WORDPIECE = "tokenizer.model", "vocab.txt"
COUNTED_WORD = re.compile(r"\S+ \d+")
"""A line of a fairseq dictionary, whose name is `vocab.txt` too (PhoBERT, BERTweet): a token and its count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyDifference:
    """How the vocabulary in `file` differs from that in `tokenizer.json`; added tokens do not count."""

    file: str
    tokens: int
    """The number of tokens in `file`."""
    others: int
    """The number of tokens in `tokenizer.json`."""
    moved: int
    """The number of ids that have another token in `file`."""
    example: tuple[int, str, str] | None
    """The first such id, its token in `tokenizer.json`, and its token in `file`."""


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
    differences: tuple[VocabularyDifference, ...] = ()
    """The files that hold another vocabulary than `tokenizer.json`."""

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

    others: dict[str, _Vocabulary] = {}
    for name, parse in ((SENTENCEPIECE, _pieces), (WORDPIECE, _lines)):
        try:
            found = parse(checkpoint.files.read(name), name) if checkpoint.files.has(name) else None
        except CheckpointError as error:
            problems[name] = error.message
        else:
            if found is not None:
                others[name] = found
    differences: tuple[VocabularyDifference, ...] = ()
    content = read("tokenizer.json")
    if isinstance(content, dict):
        files.append("tokenizer.json")
        ids.update(_ids_of_tokenizer(content))
        added_ids.update(number for _, number in _added_tokens(content))
        compared = (_difference(name, other, ids, added_ids) for name, other in others.items())
        differences = tuple(difference for difference in compared if difference is not None)
    else:
        vocabulary = read("vocab.json")
        if isinstance(vocabulary, dict):
            files.append("vocab.json")
            ids.update(_ids_of(vocabulary))
        elif others:
            name, first = next(iter(others.items()))
            files.append(name)
            ids.update(first.ids)
    added = read("added_tokens.json")
    if isinstance(added, dict):
        files.append("added_tokens.json")
        added_ids.update(_ids_of(added).values())
        ids.update(_ids_of(added))
    named = read("special_tokens_map.json")
    if isinstance(named, dict):
        files.append("special_tokens_map.json")
        special = {part: text for part, value in named.items() if (text := _text(value)) is not None}
    if not files and not problems:
        return None
    settings = read("tokenizer_config.json")
    if isinstance(settings, dict):
        if files[:1] in ([SENTENCEPIECE], [WORDPIECE]):
            decoder = settings.get("added_tokens_decoder")
            further = dict(_added_by_id(decoder if isinstance(decoder, dict) else {}))
            added_ids.update(further.values())
            ids.update(further)
        named = {part: text for part, value in settings.items() if (text := _text(value)) is not None}
        special = {part: text for part, text in named.items() if part.endswith("_token")} | special
    return TokenizerFacts(
        ids=ids,
        files=tuple(files),
        largest_id=max(ids.values(), default=None),
        added=frozenset(added_ids),
        special=special,
        problems=problems,
        differences=differences,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The ids of a file by token, and those of them whose token must be the same in every file of the vocabulary."""

    ids: Mapping[str, int]
    plain: frozenset[int]


def _pieces(data: bytes, name: str) -> _Vocabulary | None:
    """The pieces of `tokenizer.model`; `None` if it is tiktoken's, whose tokens are bytes and have no texts."""
    from bowline.checkpoint.formats.sentencepiece_model import PieceType, is_tiktoken, read_pieces

    if is_tiktoken(data):
        return None
    pieces = read_pieces(data, name)
    plain = frozenset(number for number, piece in enumerate(pieces) if piece.type == PieceType.NORMAL)
    return _Vocabulary({piece.text: number for number, piece in enumerate(pieces)}, plain)


def _lines(data: bytes, name: str) -> _Vocabulary | None:
    """The tokens of `vocab.txt`, one a line, as BERT's tokenizer reads it; `None` if it is a fairseq dictionary."""
    try:
        lines = io.StringIO(data.decode("utf-8"), newline=None).read().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 at byte {error.start}", help="fetch the file again") from None
    if lines[-1] == "":
        del lines[-1]
    if lines and all(COUNTED_WORD.fullmatch(line) for line in lines):
        return None
    ids = {token: number for number, token in enumerate(lines)}
    return _Vocabulary(ids, frozenset(ids.values()))


def _difference(
    file: str, other: _Vocabulary, ids: Mapping[str, int], added: Collection[int]
) -> VocabularyDifference | None:
    """How a file's vocabulary differs from that of `tokenizer.json`, or `None`: in its size, or in a token of an id."""
    theirs = {number: token for token, number in other.ids.items() if number not in added}
    ours = {number: token for token, number in ids.items() if number not in added}
    moved = sorted(number for number in theirs.keys() & ours.keys() & other.plain if theirs[number] != ours[number])
    if len(theirs) == len(ours) and not moved:
        return None
    return VocabularyDifference(
        file=file,
        tokens=len(theirs),
        others=len(ours),
        moved=len(moved),
        example=(moved[0], ours[moved[0]], theirs[moved[0]]) if moved else None,
    )


def _added_by_id(decoder: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for number, token in decoder.items():
        if number.isascii() and number.isdigit() and len(number) < 16:
            yield from _counted([(_text(token), int(number))])


def _tokens_of_gguf(checkpoint: Checkpoint, file: str) -> TokenizerFacts | None:
    """The tokens in a GGUF file's metadata, which are decoded when a finding first needs one."""
    try:
        tokens = checkpoint.token_ids()
    except CheckpointError as error:
        return TokenizerFacts(ids={}, files=(), largest_id=None, problems={file: error.message})
    if tokens is None:
        return None
    return TokenizerFacts(ids=tokens, files=(file,), largest_id=tokens.length - 1 if tokens.length else None)


def _ids_of_tokenizer(content: Mapping[str, Any]) -> dict[str, int]:
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids = _ids_of(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of their ids
        firsts = (pair[0] if isinstance(pair, list) and pair else None for pair in vocabulary)
        ids = {first: position for position, first in enumerate(firsts) if isinstance(first, str)}
    else:
        ids = {}
    return ids | dict(_added_tokens(content))


def _ids_of(vocabulary: Mapping[str, Any]) -> dict[str, int]:
    """The ids of a JSON object that maps tokens to them; a value that is not an id is left out."""
    return {token: number for token, number in vocabulary.items() if type(number) is int and number >= 0}


def _added_tokens(content: Mapping[str, Any]) -> list[tuple[str, int]]:
    added = content.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return _counted((token.get("content"), token.get("id")) for token in tokens)


def _counted(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str, int]]:
    """The pairs of a token and an id; others are left out."""
    return [
        (token, number) for token, number in pairs if isinstance(token, str) and type(number) is int and number >= 0
    ]


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
