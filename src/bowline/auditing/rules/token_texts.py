"""Writes row ids for messages: as ranges, and with the tokens that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from bowline.auditing.evidence import Evidence
from bowline.checkpoint.formats.strict_json import shown
from bowline.wording import listed

if TYPE_CHECKING:  # an audit of headers needs no numpy
    from bowline.auditing.difference import TableDifference

__all__ = ["rows_and_tokens", "runs", "tokens_of", "tokens_of_difference"]

MOST_TOKENS = 4
BY_ROW = ("added tokens", "some rows")
"""The causes of a difference that is one of some rows."""


def tokens_of(evidence: Evidence, rows: Iterable[int], limit: int = MOST_TOKENS) -> str:
    """Tokens of some of the rows, from all over them: `; among them '<unused0>', '<unused99>'`; of one row `: 'a'`.

    Empty if the checkpoint has no tokenizer, or none of the rows is a token's.
    """
    wanted = {int(row) for row in rows}
    ids = evidence.tokenizer.ids.items() if evidence.tokenizer else ()
    tokens = {number: token for token, number in ids if number in wanted}
    numbers = sorted(tokens)
    if not numbers:
        return ""
    if len(wanted) == 1:
        return ": " + shown(tokens[numbers[0]])
    some = [numbers[at * (len(numbers) - 1) // (limit - 1)] for at in range(limit)] if len(numbers) > limit else numbers
    return "; among them " + ", ".join(shown(tokens[number]) for number in some)


def runs(rows: Iterable[int], limit: int = 4) -> str:
    """Row ids as ranges.

    Example:
        >>> runs([0, 1, 2, 3, 17, *range(99, 121), 130, 140]), runs([])
        ('0-3, 17, 99-120, 130 and 1 more runs', '')
    """
    ids = sorted(int(row) for row in rows)
    if not ids:
        return ""
    starts = [ids[0], *(after for before, after in pairwise(ids) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ids) if after != before + 1), ids[-1]]
    names = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return listed(names, limit, rest="more runs")


def tokens_of_difference(evidence: Evidence, difference: TableDifference | None) -> str:
    """Tokens of the first rows in which two tables differ, as `tokens_of` writes them.

    Empty where all rows differ, or all by one operation: then no row says more than another.
    """
    if difference is None or difference.cause.value not in BY_ROW:
        return ""
    return tokens_of(evidence, difference.some_rows)


def rows_and_tokens(evidence: Evidence, difference: TableDifference, unit: tuple[str, str] = ("row", "rows")) -> str:
    """The same with the ids: `; they are rows 3, 7; among them 'a', 'b'`. Empty without a tokenizer."""
    tokens = tokens_of_difference(evidence, difference)
    if not tokens:
        return ""
    one, several = unit
    which = f"the first are {several}"
    if difference.rows_differing <= len(difference.some_rows):
        which = f"it is {one}" if difference.rows_differing == 1 else f"they are {several}"
    return f"; {which} {runs(difference.some_rows, limit=8)}{tokens}"
