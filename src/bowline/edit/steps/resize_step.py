"""Another number of rows for the vocabulary, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bowline.auditing.tokenizer_files import read_tokenizer as tokenizer_facts
from bowline.edit.draft import Draft, DraftFiles
from bowline.edit.made_rows import check_rule
from bowline.edit.row_selection import RowSelection, vocabulary_of, with_rows
from bowline.errors import UsageError

__all__ = ["ResizeStep"]

LIKE = "like:"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ResizeStep:
    """`to` tokens, rounded up to a multiple; the first ids stay, further rows are made by `new_rows`.

    `add_tokens` are texts that become tokens after the last one of the tokenizer. A rule `like:TEXT` starts each new
    row at the mean of the rows of TEXT's pieces, `like:` at that of the pieces of each added token's own text.
    """

    to: int | None = None
    pad_to_multiple_of: int | None = None
    new_rows: str = "mean"
    add_tokens: tuple[str, ...] = ()
    verb: ClassVar[str] = "resize"

    def __str__(self) -> str:
        to = f" --to {self.to}" if self.to is not None else ""
        multiple = f" --pad-to-multiple-of {self.pad_to_multiple_of}" if self.pad_to_multiple_of is not None else ""
        added = f" --add-tokens ({len(self.add_tokens)} tokens)" if self.add_tokens else ""
        return f"resize{to}{multiple}{added}" + (f" --new-rows {self.new_rows}" if self.new_rows != "mean" else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with that many rows in every tensor of the vocabulary.

        Raises:
            UsageError: an invalid size or rule, or a token that the tokenizer or a config uses would go.
            TieError: the vocabulary's axes cannot be told from others, or a table is quantised.
        """
        for name, count in (("to", self.to), ("pad_to_multiple_of", self.pad_to_multiple_of)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise UsageError(f"{name}={count!r}: expected a whole number from 1", argument=name)
        if self.to is None and self.pad_to_multiple_of is None and not self.add_tokens:
            raise UsageError("expected a size, a multiple or tokens to add", argument=("to", "pad_to_multiple_of"))
        vocabulary = vocabulary_of(draft)
        pieces: dict[int, list[int]] = {}
        tokens = vocabulary.size
        if self.add_tokens or self.new_rows.startswith(LIKE):
            draft, pieces, tokens = self._with_tokens(draft, vocabulary.size)
        if not self.new_rows.startswith(LIKE):
            check_rule(self.new_rows, vocabulary.size)
        if self.to is not None and self.to < tokens and self.add_tokens:
            raise UsageError(f"to={self.to}: the added tokens have ids up to {tokens - 1}", argument="to")
        tokens, multiple = self.to or tokens, self.pad_to_multiple_of or 1
        size = -(-tokens // multiple) * multiple
        if size == vocabulary.size and not pieces:
            return draft.with_notes(f"the vocabulary has {size} rows")
        if size < vocabulary.size:
            _keep_tokens(draft, size)
        selection = RowSelection(vocabulary.size, size, np.arange(min(tokens, vocabulary.size), dtype=np.int64))
        way_out = f"keep more rows, or prune: it gives the tokens that stay new ids below {size}"
        rule = "mean" if self.new_rows.startswith(LIKE) else self.new_rows
        return with_rows(draft, vocabulary, selection, rule, way_out, pieces)

    def _with_tokens(self, draft: Draft, size: int) -> tuple[Draft, dict[int, list[int]], int]:
        """The draft with the added tokens in its tokenizer, the pieces by new row, and the number of tokens."""
        from bowline.edit.tokenizer import added_tokens, pieces, read_tokenizer

        files = DraftFiles(draft)
        tokenizer = read_tokenizer(files)
        added = added_tokens(files, tokenizer, self.add_tokens) if self.add_tokens else None
        ids = added.ids if added is not None else {}
        found: dict[int, list[int]] = {}
        if self.new_rows.startswith(LIKE):
            like = self.new_rows.removeprefix(LIKE)
            if not like and not ids:
                raise UsageError(f"new_rows={self.new_rows!r}: expected a text", help="like:TEXT", argument="new_rows")
            for text, number in ids.items():
                found[number] = _pieces_of(like or text, pieces(tokenizer, [like or text])[0].tolist(), size)
            if not ids:
                shared = _pieces_of(like, pieces(tokenizer, [like])[0].tolist(), size)
                found = dict.fromkeys(range(size, max(size, self.to or 0)), shared)
        if added is not None:
            draft = draft.with_texts(added.files)
            reused = [text for text, number in ids.items() if number < size]
            if reused:
                draft = draft.with_notes(f"{len(reused)} of the added tokens take rows of the table that no token had")
        return draft, found, max(size, max(ids.values(), default=-1) + 1)


def _pieces_of(text: str, ids: list[int], size: int) -> list[int]:
    inside = [number for number in ids if number < size]
    if not inside:
        raise UsageError(f"like:{text}: the tokenizer splits it into no token that has a row", argument="new_rows")
    return inside


def _keep_tokens(draft: Draft, size: int) -> None:
    """Raise if the tokenizer has ids from `size` on: their rows would be missing.

    Raises:
        UsageError: it has.
    """
    if TOKENIZER in draft.texts:
        from bowline.edit.tokenizer import read_tokenizer

        tokens = read_tokenizer(DraftFiles(draft)).size
    else:
        facts = tokenizer_facts(draft.source)
        tokens = facts.size if facts is not None else 0
    if tokens > size:
        raise UsageError(
            f"to={size}: the tokenizer has ids up to {tokens - 1}, whose rows would go",
            help="`bowline prune` removes tokens from the tokenizer too",
            argument="to",
        )
