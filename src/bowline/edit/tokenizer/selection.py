"""Chooses the tokens that stay when a vocabulary is pruned, with the reason for each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from bowline.edit.tokenizer.alphabet import BYTE_LETTERS, byte_alphabet, byte_pieces, characters, unspelled
from bowline.edit.tokenizer.merge_closure import by_merges
from bowline.edit.tokenizer.stored_tokenizer import Kind, StoredTokenizer
from bowline.edit.tokenizer.token_counts import CorpusCount
from bowline.errors import UsageError

__all__ = ["Reason", "TokenSelection", "select_tokens", "token_map", "token_texts"]


class Reason(StrEnum):
    """Why a token stays; a token with several reasons has the first of them in this order."""

    CORPUS = "in the corpus"
    KEEP_FILE = "in the keep file"
    PATTERN = "matches the pattern"
    SPECIAL = "special"
    ADDED = "added"
    NAMED = "named in a config"
    BYTE_ALPHABET = "byte alphabet"
    BYTE_FALLBACK = "byte fallback"
    CHARACTER = "single character"
    SPELLING = "has a character that is no token by itself"
    LOWEST_SCORE = "lowest score, from which that of unknown characters follows"
    UNKNOWN_WORD = "begins a word of the corpus that is unknown"
    MERGE_PATH = "on a merge path"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """The tokens that stay, in their old order. Their new ids are their positions."""

    kept: npt.NDArray[np.int64]
    """The old ids (N,), ascending."""
    reasons: tuple[Reason, ...]
    """Why each of them stays."""
    remap: npt.NDArray[np.int64]
    """The new id of each old id (V,), -1 for those that go."""
    merges: npt.NDArray[np.int64]
    """The ranks of BPE's merges that stay, ascending."""

    @property
    def counts(self) -> dict[Reason, int]:
        """The number of tokens that stay for each reason."""
        found = Counter(self.reasons)
        return {reason: found[reason] for reason in Reason if found[reason]}

    def new_id(self, old: int) -> int:
        """The new id of an old one; -1 if its token goes, or if there was none."""
        return int(self.remap[old]) if 0 <= old < len(self.remap) else -1


def select_tokens(
    tokenizer: StoredTokenizer,
    *,
    corpus: CorpusCount | None = None,
    listed: Iterable[int] = (),
    pattern: str | None = None,
    named: Iterable[int] = (),
) -> TokenSelection:
    """The tokens that a text uses or a person asks for, and those without which the others would not work.

    Every added and special token stays, and so does what the tokenizer's files name, what spells any text (the byte
    alphabet, the byte pieces, or the single characters), and each token on a merge path to another.

    Arguments:
        tokenizer: what `read_tokenizer` returned.
        corpus: what `count_tokens` returned.
        listed: ids to keep, from `keep_file`.
        pattern: a regular expression; tokens stay in whose text it is found. A byte-level token is decoded first,
            and the mark of a space (U+2581) is read as a space.
        named: ids that the model's configs name. An id that no token has stays as a row without a token.

    Raises:
        UsageError: the pattern is not a regular expression, or nothing was asked for.

    Example:
        >>> select_tokens(tokenizer, corpus=count_tokens(tokenizer, [Path("corpus.txt")]))  # doctest: +SKIP
    """
    if corpus is None and pattern is None and not (listed := list(listed)):
        raise UsageError("nothing says which tokens to keep", help="give a corpus, a list of tokens, or a pattern")
    reasons: dict[int, Reason] = {}

    def keep(ids: Iterable[int], reason: Reason) -> None:
        for number in ids:
            reasons.setdefault(number, reason)

    if corpus is not None:
        keep(corpus.used.tolist(), Reason.CORPUS)
    keep(listed, Reason.KEEP_FILE)
    if pattern is not None:
        keep(_matching(tokenizer, pattern), Reason.PATTERN)
    keep((number for number, special in tokenizer.added.items() if special), Reason.SPECIAL)
    keep(tokenizer.added, Reason.ADDED)
    keep((*tokenizer.named, *named), Reason.NAMED)
    keep(byte_alphabet(tokenizer), Reason.BYTE_ALPHABET)
    keep(byte_pieces(tokenizer), Reason.BYTE_FALLBACK)
    keep(characters(tokenizer), Reason.CHARACTER)
    keep(unspelled(tokenizer), Reason.SPELLING)
    if tokenizer.kind is Kind.UNIGRAM:
        scores = [score for _, score in tokenizer.model["vocab"]]
        keep([scores.index(min(scores))] if scores else [], Reason.LOWEST_SCORE)
    if corpus is not None:
        keep(sorted(corpus.tried), Reason.UNKNOWN_WORD)
    merges = np.zeros(0, np.int64)
    if tokenizer.kind.merges:
        closure = by_merges(tokenizer.ids, tokenizer.merges, reasons, prefix=tokenizer.prefix, suffix=tokenizer.suffix)
        keep(sorted(closure.tokens), Reason.MERGE_PATH)
        merges = closure.merges
    kept = np.array(sorted(reasons), np.int64)
    remap = np.full(max(tokenizer.size, int(kept[-1]) + 1 if len(kept) else 0), -1, np.int64)
    remap[kept] = np.arange(len(kept))
    return TokenSelection(
        kept=kept, reasons=tuple(reasons[number] for number in kept.tolist()), remap=remap, merges=merges
    )


def token_map(selection: TokenSelection) -> bytes:
    """The content of `token_map.json`: an object from each old id that stays to its new one.

    Example:
        >>> kept = np.array([0, 7])
        >>> selection = TokenSelection(kept=kept, reasons=(Reason.ADDED, Reason.CORPUS), remap=kept, merges=kept[:0])
        >>> token_map(selection)
        b'{\\n"0": 0,\\n"7": 1\\n}\\n'
    """
    lines = ",\n".join(f'"{old}": {new}' for new, old in enumerate(selection.kept.tolist()))
    return f"{{\n{lines}\n}}\n".encode("ascii")


def token_texts(tokenizer: StoredTokenizer) -> Mapping[int, str]:
    """What each token stands for, by id: bytes decoded, the mark of a space as a space.

    A byte-level token that is not whole UTF-8 characters is left out.
    """
    if tokenizer.kind is not Kind.BYTE_LEVEL_BPE:
        return {number: text.replace("\u2581", " ") for text, number in tokenizer.ids.items()}
    bytes_of = {letter: byte for byte, letter in BYTE_LETTERS.items()}
    found: dict[int, str] = {}
    for text, number in tokenizer.ids.items():
        if number in tokenizer.added or not all(letter in bytes_of for letter in text):
            found[number] = text
        else:
            try:
                found[number] = bytes(bytes_of[letter] for letter in text).decode("utf-8")
            except UnicodeDecodeError:
                continue
    return found


def _matching(tokenizer: StoredTokenizer, pattern: str) -> list[int]:
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise UsageError(
            f"pattern: {pattern!r} is not a regular expression ({error})",
            help="give one in the syntax of Python's re",
            argument="pattern",
        ) from None
    return [number for number, text in token_texts(tokenizer).items() if search(text)]
