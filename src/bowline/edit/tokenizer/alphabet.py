"""The tokens with which any text can still be spelled once the others are gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bowline.edit.tokenizer.stored_tokenizer import BYTE_PIECES, Kind, StoredTokenizer

__all__ = ["BYTE_LETTERS", "byte_alphabet", "byte_pieces", "characters", "unspelled"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + at) for at, byte in enumerate(_OTHERS)}
"""The letter that stands for each byte in a byte-level vocabulary (GPT-2, 2019)."""


def byte_alphabet(tokenizer: StoredTokenizer) -> Iterator[int]:
    """The ids of the letters that stand for bytes, in a byte-level tokenizer."""
    if tokenizer.kind is Kind.BYTE_LEVEL_BPE:
        for letter in BYTE_LETTERS.values():
            yield from (tokenizer.ids[form] for form in _forms(letter, tokenizer) if form in tokenizer.ids)


def byte_pieces(tokenizer: StoredTokenizer) -> Iterator[int]:
    """The ids of the pieces `<0x00>` to `<0xFF>` that stand for the bytes of a character that is not a token."""
    if tokenizer.model.get("byte_fallback") is True:
        yield from (tokenizer.ids[piece] for piece in BYTE_PIECES if piece in tokenizer.ids)


def characters(tokenizer: StoredTokenizer) -> Iterator[int]:
    """The ids of single characters that must stay so that no text becomes unknown.

    Where a character can fall back to bytes, these are only the characters that the tokenizer's steps put in place of
    others, such as the mark of a space: as bytes they would not be put back.
    """
    if tokenizer.kind in (Kind.BYTE_LEVEL_BPE, Kind.WORDLEVEL):
        return
    if tokenizer.decodes_bytes:
        wanted = _replacements([tokenizer.content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
        yield from {tokenizer.ids[one] for one in wanted if one in tokenizer.ids}
        return
    prefix, suffix = tokenizer.prefix, tokenizer.suffix
    for text, number in tokenizer.ids.items():
        if len(text) == 1 or (
            len(text) <= 1 + len(prefix) + len(suffix) and any(text in _forms(one, tokenizer) for one in set(text))
        ):
            yield number


def unspelled(tokenizer: StoredTokenizer) -> Iterator[int]:
    """The ids of tokens with a character that is no token by itself: without these tokens it would become unknown."""
    if tokenizer.decodes_bytes or tokenizer.kind in (Kind.BYTE_LEVEL_BPE, Kind.WORDLEVEL):
        return
    ids, prefix, suffix = tokenizer.ids, tokenizer.prefix, tokenizer.suffix
    if tokenizer.kind is Kind.UNIGRAM:
        alone = {text for text in ids if len(text) == 1}
        yield from (number for text, number in ids.items() if not alone.issuperset(text))
        return
    if tokenizer.kind.merges and tokenizer.model.get("ignore_merges") is not True:
        return  # every token is built from characters that are tokens
    for text, number in ids.items():
        continues = bool(prefix) and text.startswith(prefix) and len(text) > len(prefix)
        body = (text[len(prefix) :] if continues else text).removesuffix(suffix)
        if any((prefix if at or continues else "") + one not in ids for at, one in enumerate(body)):
            yield number


def _forms(character: str, tokenizer: StoredTokenizer) -> set[str]:
    """How a character stands in the vocabulary: alone, and with the marks of its place in a word."""
    prefix, suffix = tokenizer.prefix, tokenizer.suffix
    return {character, prefix + character, character + suffix, prefix + character + suffix}


def _replacements(part: Any) -> set[str]:
    """The single characters among the texts of a tokenizer's steps."""
    if isinstance(part, str):
        return {part} if len(part) == 1 else set()
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return set().union(*(_replacements(one) for one in inner))
