"""Selects the tokens that stay in a resized vocabulary: their new ids, and the old row of each new row."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bowline.errors import UsageError

__all__ = ["Selection", "select"]

NEW = -1
"""Marks a new row in a list of origins, and a dropped token in a remap."""
EXPECTED = "a number of tokens, or a sequence of the ids to keep"


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A selection: the `kept` old ids become the first new ids, in their order; rows up to `size` are new.

    `tail` is the number of rows past the vocabulary that have ids too; they stay past it.
    """

    old_size: int
    size: int
    kept: torch.Tensor
    tail: int

    @property
    def remap(self) -> torch.Tensor:
        """Old id to new id, -1 where the token is dropped; (old size + tail,)."""
        remap = torch.full((self.old_size + self.tail,), NEW)
        remap[self.kept] = torch.arange(len(self.kept))
        remap[self.old_size :] = torch.arange(self.size, self.size + self.tail)
        return remap

    @property
    def in_place(self) -> bool:
        """Whether every token that stays keeps its id."""
        return len(self.kept) == 0 or bool((self.kept == torch.arange(len(self.kept))).all())

    def origins(self, excess: int, stand_in: int | None = None) -> torch.Tensor:
        """The old row of each row, or -1, for a tensor that is `excess` rows longer than the vocabulary."""
        held = self.old_size + min(excess, 0)
        rows = torch.full((self.size + excess,), NEW)
        kept = torch.where(self.kept < held, self.kept, NEW if stand_in is None else stand_in)[: len(rows)]
        rows[: len(kept)] = kept
        if excess > 0:
            rows[self.size :] = torch.arange(self.old_size, self.old_size + excess)
        return rows


def select(n: int | Sequence[int] | torch.Tensor, old_size: int, tail: int, multiple: int | None) -> Selection:
    """The tokens that `n` selects: the first `n`, or those of a list of ids, rounded up to a `multiple`.

    Raises:
        UsageError: `n` or `multiple` is not a size, or a list has an id twice or one outside the vocabulary.
    """
    if multiple is not None and (isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1):
        raise UsageError(
            f"pad_to_multiple_of={multiple!r}: expected a whole number from 1", argument="pad_to_multiple_of"
        )
    _check_kind(n)
    whole = _whole(n)
    if whole is not None:
        if whole < 1:
            raise UsageError(f"n={whole}: expected at least one token", argument="n")
        kept, tokens = torch.arange(min(whole, old_size)), whole
    else:
        kept = _ids(n, old_size)
        tokens = len(kept)
    return Selection(old_size, -(-tokens // (multiple or 1)) * (multiple or 1), kept, tail)


def _check_kind(n: Any) -> None:
    """Raise for values that look like ids but are not, and for collections without an order."""
    if isinstance(n, torch.Tensor) and n.dtype is torch.bool:
        raise UsageError(
            f"n is a boolean mask, expected {EXPECTED}",
            help="pass the ids: mask.nonzero().flatten()",
            argument="n",
        )
    if isinstance(n, (Mapping, set, frozenset)):
        raise UsageError(f"n is a {type(n).__name__}, expected {EXPECTED}", argument="n")


def _whole(n: Any) -> int | None:
    if isinstance(n, torch.Tensor) and n.ndim:
        return None
    if isinstance(n, bool):
        raise UsageError(f"n={n!r}: expected {EXPECTED}", argument="n")
    try:
        return operator.index(n)
    except TypeError:
        return None


def _ids(n: Any, old_size: int) -> torch.Tensor:
    try:
        listed = n.tolist() if isinstance(n, torch.Tensor) else list(n)
        ids = [operator.index(one) for one in listed]
    except TypeError:
        raise UsageError(f"n={n!r}: expected {EXPECTED}", argument="n") from None
    if any(isinstance(one, bool) for one in listed):
        raise UsageError(f"n={n!r:.60}: expected {EXPECTED}", argument="n")
    if not ids:
        raise UsageError("n is an empty list, expected at least one token id to keep", argument="n")
    outside = next((one for one in ids if not 0 <= one < old_size), None)
    if outside is not None:
        raise UsageError(
            f"n lists token {outside}, but the vocabulary has only the ids 0 to {old_size - 1}", argument="n"
        )
    if len(set(ids)) < len(ids):
        twice = next(one for at, one in enumerate(ids) if one in ids[:at])
        raise UsageError(f"n lists token {twice} twice", help="list each id once", argument="n")
    return torch.tensor(ids)
