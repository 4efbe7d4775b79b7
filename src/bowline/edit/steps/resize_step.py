"""Another number of rows for the vocabulary, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bowline.auditing.tokenizer_files import read_tokenizer
from bowline.edit.draft import Draft
from bowline.edit.made_rows import check_rule
from bowline.edit.row_selection import RowSelection, vocabulary_of, with_rows
from bowline.errors import UsageError

__all__ = ["ResizeStep"]


@dataclass(frozen=True, slots=True)
class ResizeStep:
    """`to` tokens, rounded up to a multiple; the first ids stay, further rows are made by `new_rows`."""

    to: int | None = None
    pad_to_multiple_of: int | None = None
    new_rows: str = "mean"
    verb: ClassVar[str] = "resize"

    def __str__(self) -> str:
        to = f" --to {self.to}" if self.to is not None else ""
        multiple = f" --pad-to-multiple-of {self.pad_to_multiple_of}" if self.pad_to_multiple_of is not None else ""
        return f"resize{to}{multiple}" + (f" --new-rows {self.new_rows}" if self.new_rows != "mean" else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with that many rows in every tensor of the vocabulary.

        Raises:
            UsageError: an invalid size or rule, or a token that the tokenizer or a config uses would go.
            TieError: the vocabulary's axes cannot be told from others, or a table is quantised.
        """
        for name, count in (("to", self.to), ("pad_to_multiple_of", self.pad_to_multiple_of)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise UsageError(f"{name}={count!r}: expected a whole number from 1", argument=name)
        if self.to is None and self.pad_to_multiple_of is None:
            raise UsageError("expected a size or a multiple", argument=("to", "pad_to_multiple_of"))
        vocabulary = vocabulary_of(draft)
        check_rule(self.new_rows, vocabulary.size)
        tokens, multiple = self.to or vocabulary.size, self.pad_to_multiple_of or 1
        size = -(-tokens // multiple) * multiple
        if size == vocabulary.size:
            return draft.with_notes(f"the vocabulary has {size} rows already")
        if size < vocabulary.size:
            _keep_tokens(draft, size)
        selection = RowSelection(vocabulary.size, size, np.arange(min(tokens, vocabulary.size), dtype=np.int64))
        way_out = f"keep more rows, or prune: it gives the tokens that stay new ids below {size}"
        return with_rows(draft, vocabulary, selection, self.new_rows, way_out)


def _keep_tokens(draft: Draft, size: int) -> None:
    """Raise if the tokenizer has ids from `size` on: their rows would be missing.

    Raises:
        UsageError: it has.
    """
    facts = read_tokenizer(draft.source)
    if facts is not None and facts.size > size:
        raise UsageError(
            f"to={size}: the tokenizer has ids up to {facts.largest_id}, whose rows would go",
            help="`bowline prune` removes tokens from the tokenizer too",
            argument="to",
        )
