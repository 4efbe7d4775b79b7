"""Unigram as llama.cpp reads it, T5's kind of tokenizer: pieces with scores, and the map of characters before them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer import StoredTokenizer
from bowline.edit.tokenizer.stored_tokenizer import BYTE_PIECES
from bowline.errors import FormatError, UsageError
from bowline.export.gguf.character_map import REPAIR, checked_charsmap
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import boolean, number, octets, text
from bowline.export.gguf.sentencepiece_tokens import LEADING_SPACE, SPACE, word_start
from bowline.export.gguf.token_types import (
    TokenizerKeys,
    TokenType,
    added_type,
    condition_notes,
    is_part,
    listed_tokens,
)

__all__ = ["ADDED_SCORE", "BYTES_UNKNOWN", "unigram_keys"]

ADDED_SCORE = -1000.0
"""The score of an added token, as llama.cpp's converter writes it; it finds such tokens in the text itself."""
BYTES_UNKNOWN = (
    "a character without a piece becomes one unknown token in llama.cpp; the tokenizer spells it in byte pieces"
)
ONLY_SPACES = (
    "llama.cpp splits at spaces only, tokenizer.json at tabs and newlines too: it has no map of characters that makes "
    "spaces of them"
)


def unigram_keys(tokenizer: StoredTokenizer, rows: int) -> TokenizerKeys:
    """The keys of a Unigram tokenizer.

    Raises:
        UsageError: llama.cpp would split text in another way.
        FormatError: the map of characters is malformed.
    """
    model = tokenizer.model
    unknown = model.get("unk_id")
    if unknown is None:
        raise UsageError("tokenizer.json: model.unk_id is null, but llama.cpp needs an unknown token", help=CONVERTER)
    types = dict(_types(tokenizer, unknown))
    pieces = {token: float(score) for token, (_, score) in enumerate(model["vocab"])}
    normal = [score for token, score in pieces.items() if types.get(token) is TokenType.NORMAL]
    if not normal:
        raise UsageError("tokenizer.json: model.vocab has only special tokens, expected pieces", help=REPAIR)
    if min(normal) != min(pieces.values()):
        raise UsageError(
            "tokenizer.json: the lowest score is that of a special token, but llama.cpp takes the score of unknown "
            "characters from the lowest of the others",
            help=CONVERTER,
        )
    charsmap, merges_spaces, prefixed, notes = _normalisation(tokenizer, types)
    if model.get("byte_fallback") is True:
        notes = (*notes, BYTES_UNKNOWN)
    scores = {token: pieces.get(token, ADDED_SCORE) for token in tokenizer.texts}
    keys = {
        "tokenizer.ggml.model": text("t5"),
        "tokenizer.ggml.pre": text("default"),
        **listed_tokens(tokenizer.texts, types, rows, scores),
        "tokenizer.ggml.unknown_token_id": number(unknown),
        "tokenizer.ggml.add_space_prefix": boolean(prefixed),
        "tokenizer.ggml.remove_extra_whitespaces": boolean(merges_spaces),
    }
    if charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = octets(charsmap)
    return TokenizerKeys(keys=keys, notes=(*notes, *condition_notes(tokenizer)))


def _types(tokenizer: StoredTokenizer, unknown: int) -> Iterator[tuple[int, TokenType]]:
    for token in tokenizer.texts:
        if token == unknown:
            yield token, TokenType.UNKNOWN
        elif tokenizer.model.get("byte_fallback") is True and tokenizer.texts[token] in BYTE_PIECES:
            yield token, TokenType.BYTE
        else:
            yield token, added_type(tokenizer, token) if token in tokenizer.added else TokenType.NORMAL


def _normalisation(
    tokenizer: StoredTokenizer, types: dict[int, TokenType]
) -> tuple[bytes, bool, bool, tuple[str, ...]]:
    """The map of characters; whether several spaces count as one; whether a text gets one in front; notes.

    Raises:
        UsageError: there is a step that llama.cpp does not know.
        FormatError: the map is malformed.
    """
    charsmap, merges_spaces, strips = b"", False, False
    for step in _steps(tokenizer.content.get("normalizer"), "normalizers"):
        if is_part(step, "Precompiled") and not charsmap:
            charsmap = _decoded(step.get("precompiled_charsmap"))
        elif is_part(step, "Replace") and _merges_spaces(step):
            merges_spaces = True
        elif is_part(step, "Strip"):
            strips = True
        else:
            raise _unknown(tokenizer)
    splitters = _steps(tokenizer.content.get("pre_tokenizer"), "pretokenizers")
    start = word_start(splitters[-1]) if splitters else None
    by_white_space = len(splitters) == 2 and is_part(splitters[0], "WhitespaceSplit")
    if start is None or not (by_white_space or len(splitters) == 1):
        raise _unknown(tokenizer)
    prefixed, splits = start
    merges_spaces = merges_spaces or by_white_space
    if strips and not merges_spaces:  # llama.cpp drops spaces at the ends only together with the others
        raise _unknown(tokenizer)
    if (splits or by_white_space) and any(
        kind is TokenType.NORMAL and SPACE in tokenizer.texts[token][1:] for token, kind in types.items()
    ):
        raise UsageError(
            "tokenizer.json splits text at spaces, but has tokens with a space inside: llama.cpp would use them",
            help=CONVERTER,
        )
    notes = [ONLY_SPACES] if by_white_space and not charsmap else []
    if prefixed and not merges_spaces:
        notes.append(LEADING_SPACE)
    return charsmap, merges_spaces, prefixed, tuple(notes)


def _merges_spaces(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"Regex": " {2,}"} and step.get("content") in (" ", SPACE)


def _steps(part: Any, key: str) -> list[Any]:
    steps = part.get(key) if is_part(part, "Sequence") else [part]
    return [step for step in steps if step is not None] if isinstance(steps, list) else [part]


def _unknown(tokenizer: StoredTokenizer) -> UsageError:
    normalizer, splitter = tokenizer.content.get("normalizer"), tokenizer.content.get("pre_tokenizer")
    return UsageError(
        f"tokenizer.json normalises by {shown(normalizer)} and splits by {shown(splitter)}, expected SentencePiece's "
        "map of characters and words that begin with a space",
        help=CONVERTER,
    )


def _decoded(value: Any) -> bytes:
    place = "tokenizer.json: normalizer.precompiled_charsmap"
    if value is None:
        return b""
    try:
        data = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise FormatError(f"{place}: {shown(value)}, expected base64", help=REPAIR) from None
    return checked_charsmap(data, place)
