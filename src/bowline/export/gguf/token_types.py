"""The keys that every kind of tokenizer has in a GGUF file: the tokens by id, and llama.cpp's type of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from bowline.checkpoint.formats.sentencepiece_model import PieceType as TokenType
from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer import StoredTokenizer
from bowline.export.gguf.key_values import numbers, reals, texts
from bowline.wording import joined

__all__ = ["TokenType", "TokenizerKeys", "added_type", "condition_notes", "is_part", "listed_tokens"]

NO_ROW_SCORE = -10000.0
"""The score of rows without a token, as llama.cpp's converter writes it."""
MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKeys:
    """The keys of a tokenizer in a GGUF file, and what the report says about them."""

    keys: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


def listed_tokens(
    found: Mapping[int, str], types: Mapping[int, TokenType], rows: int, scores: Mapping[int, float] | None = None
) -> dict[str, bytes]:
    """The lists of tokens, of their types and of their scores, for each row; a row without a token gets a filler."""
    named = set(found.values())
    listed = []
    for token in range(rows):
        name = found.get(token, f"[PAD{token}]")
        while token not in found and name in named:
            name = f"[{name}]"  # llama.cpp wants every text once
        listed.append(name)
    keys = {
        "tokenizer.ggml.tokens": texts(listed),
        "tokenizer.ggml.token_type": numbers([types.get(token, TokenType.UNUSED) for token in range(rows)]),
    }
    if scores is not None:
        keys["tokenizer.ggml.scores"] = reals([scores.get(token, NO_ROW_SCORE) for token in range(rows)])
    return keys


def added_type(tokenizer: StoredTokenizer, token: int) -> TokenType:
    """The type of an added token: llama.cpp looks for user-defined ones in every text, for control tokens if asked."""
    found = tokenizer.texts[token]
    looks_special = found.startswith("<|") and found.endswith("|>")
    return TokenType.CONTROL if tokenizer.added[token] or looks_special else TokenType.USER_DEFINED


def condition_notes(tokenizer: StoredTokenizer) -> tuple[str, ...]:
    """Names the added tokens that are found under conditions that llama.cpp does not know."""
    entries = tokenizer.content.get("added_tokens")
    bound = [
        shown(entry.get("content"))
        for entry in (entries if isinstance(entries, list) else [])
        if entry.get("single_word") or entry.get("lstrip") or entry.get("rstrip")
    ]
    if not bound:
        return ()
    more = [f"{len(bound) - MOST_NAMED} more"] if len(bound) > MOST_NAMED else []
    return (
        f"llama.cpp does not know the conditions (single_word, lstrip, rstrip) of the added token"
        f"{'s' if len(bound) > 1 else ''} {joined(bound[:MOST_NAMED] + more)}: text around them can split otherwise",
    )


def is_part(content: Any, kind: str) -> TypeGuard[dict[str, Any]]:
    """Whether a part of `tokenizer.json` is an object of this type."""
    return isinstance(content, dict) and content.get("type") == kind
