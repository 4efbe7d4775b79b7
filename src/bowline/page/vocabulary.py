"""The rows of an audited checkpoint as a page shows them: which tables, which rows, and which of them stand out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bowline.auditing.checkpoint_table import CheckpointTable
from bowline.auditing.evidence import Evidence
from bowline.auditing.progress import Progress
from bowline.auditing.row_scan import can_scan, check_extent
from bowline.auditing.special_ids import special_ids
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.page.row_list import RowClass, RowList, listed_rows, texts_of
from bowline.page.table_view import TableView, view_table
from bowline.tie import TieState

__all__ = ["vocabulary_rows", "vocabulary_views"]


def vocabulary_rows(evidence: Evidence, total: int) -> RowList:
    """The rows of the vocabulary with their tokens and classes."""
    classes = tuple(one for one in _classes(evidence, total) if one.ids.size)
    notable = np.concatenate([np.empty(0, np.int64), *(one.ids for one in classes)])
    listed = listed_rows(total, notable)
    ids = evidence.tokenizer.ids if evidence.tokenizer else {}
    return RowList(ids=listed, total=total, texts=texts_of(ids, listed, total), classes=classes)


def vocabulary_views(evidence: Evidence, checkpoint: Checkpoint, rows: RowList, progress: Progress) -> list[TableView]:
    """The table of each end: of a tie that is one matrix only the embedding's."""
    notable = np.concatenate([np.empty(0, np.int64), *(one.ids[:200] for one in rows.classes)])
    views = []
    for label, name in _tables(evidence):
        tensor = checkpoint.tensors[name]
        check_extent(tensor)
        source = CheckpointTable(checkpoint, tensor, progress)
        views.append(view_table(source, label=label, tensor=name, first=notable, among=rows.ids))
    return views


def _tables(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The label and the name of each table that can be shown."""
    declaration, tie = evidence.declaration, evidence.main_tie
    embedding, head = declaration.embedding, declaration.head
    found = []
    for label, name in (("input embedding", embedding), ("head", head)):
        tensor = evidence.tensors.get(name or "")
        if tensor is not None and can_scan(tensor) and len(tensor.shape) == 2 and tensor.shape[0] > 0:
            found.append((label, tensor.name))
    same = tie is not None and tie.state in (TieState.SHARED, TieState.ALIAS, TieState.EQUAL)
    if (len(found) == 2 and (same or found[0][1] == found[1][1])) or (
        len(found) == 1 and tie is not None and tie.state is TieState.SHARED
    ):
        found = [("one matrix", found[0][1])]
    yield from found


def _classes(evidence: Evidence, total: int) -> Iterator[RowClass]:
    tokenizer = evidence.tokenizer
    special = {number for number in special_ids(evidence.config or {}).values() if 0 <= number < total}
    if tokenizer is not None:
        named = (tokenizer.ids.get(text) for text in tokenizer.special.values())
        special |= {number for number in named if number is not None and number < total}
    yield _of("special", "a token that the config or the tokenizer names, such as the end of a text", special)
    if evidence.padding is not None:
        yield _of("padding", "the row of pad_token_id", {evidence.padding.id})
    if tokenizer is not None and tokenizer.ids:
        yield _of(
            "added",
            "a token that was added to the vocabulary, not trained into it",
            {one for one in tokenizer.added if one < total},
        )
        taken = np.zeros(total, np.bool_)
        taken[[number for number in tokenizer.ids.values() if 0 <= number < total]] = True
        yield _of("no token", "the tokenizer never gives this id", np.flatnonzero(~taken))
    tie = evidence.main_tie
    for table in evidence.tables:
        of = (
            ""
            if len(evidence.tables) == 1 or table.name == evidence.declaration.embedding
            else f" in {_last(table.name)}"
        )
        yield _of(f"zero{of}", "every value is 0", table.zero)
        yield _of(f"not finite{of}", "a value is infinite or NaN", table.not_finite)
        yield _of(
            f"duplicate{of}", "equal to another row, bit by bit", {row for group in table.duplicates for row in group}
        )
        yield _of(
            f"never trained{of}",
            "short, and in the one direction in which rows are pushed that are never a target",
            table.never_trained,
        )
        yield _of(
            f"alike{of}", "equal to other rows up to noise", np.concatenate([np.empty(0, np.int64), *table.alike])
        )
        if table.odd_norms is not None:
            yield _of(f"short{of}", "the norm is far below the others'", table.odd_norms.short)
            yield _of(f"long{of}", "the norm is far above the others'", table.odd_norms.long)
    if (
        tie is not None
        and tie.difference is not None
        and tie.difference.rows_differing <= len(tie.difference.some_rows)
    ):
        yield _of("ends differ", "embedding and head differ in this row", tie.difference.some_rows)


def _of(label: str, meaning: str, ids: object) -> RowClass:
    listed = np.fromiter(ids, np.int64) if not isinstance(ids, np.ndarray) else ids  # type: ignore[call-overload]
    return RowClass(label=label, meaning=meaning, ids=np.unique(listed.astype(np.int64)))


def _last(name: str) -> str:
    """The end of a tensor's name, which tells its tables apart."""
    return name if len(name) <= 24 else f"…{name[-23:]}"
