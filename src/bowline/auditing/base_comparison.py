"""Compares the embedding and the head of a checkpoint, row by row, with those of the model that it was trained from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.difference import SPACING, TableDifference, explain_difference
from bowline.auditing.progress import Progress
from bowline.auditing.row_scan import can_scan, scan_tables
from bowline.auditing.stated_declaration import declaration_of
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.families.declaration import Declaration

__all__ = ["EMBEDDING", "HEAD", "BaseComparison", "TableComparison", "compare_ends", "compare_with_base", "stored_ends"]

EMBEDDING, HEAD = "embedding", "head"
BASE = "base: "
"""In front of the base's names where both checkpoints are read as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableComparison:
    """One table beside the base's table for the same `ends`, which are "embedding", "head" or both.

    `difference` is that of the rows that both have; `None` if they are equal, or if `reason` says why they were not
    compared.
    """

    ends: tuple[str, ...]
    tensor: str
    base_tensor: str
    rows: int
    base_rows: int
    difference: TableDifference | None = None
    reason: str | None = None

    @property
    def common_rows(self) -> int:
        """The number of rows that both tables have."""
        return min(self.rows, self.base_rows)

    def __str__(self) -> str:
        added = self.rows - self.base_rows
        size = (
            f"; {abs(added)} rows {'more' if added > 0 else 'fewer'} than the base's {self.base_rows}" if added else ""
        )
        if self.reason is not None:
            return f"not compared: {self.reason}"
        if self.difference is None:
            return f"equal in all {self.common_rows} rows{size}"
        pattern = f"; looks like {self.difference}" if self.difference.has_pattern else ""
        changed, first = self.difference.rows_differing, ", ".join(map(str, self.difference.some_rows))
        which = (
            ""
            if changed == self.common_rows
            else f" ({first}{', ...' if changed > len(self.difference.some_rows) else ''})"
        )
        return f"{changed} of {self.common_rows} rows changed{which}, {self.difference.extent}{pattern}{size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """The comparison with the base at `location`: one entry for each pair of tables."""

    location: str
    tables: tuple[TableComparison, ...]

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON report."""
        return {
            "path": self.location,
            "tables": [
                {
                    "ends": list(table.ends),
                    "tensor": table.tensor,
                    "base_tensor": table.base_tensor,
                    "rows": table.rows,
                    "base_rows": table.base_rows,
                    "rows_differing": _measured(table, "rows_differing", 0),
                    "some_rows": list(_measured(table, "some_rows", ()) or ()),
                    "max_abs_difference": _measured(table, "max_abs_difference", 0.0),
                    "looks_like": str(table.difference) if table.difference else None,
                    "reason": table.reason,
                }
                for table in self.tables
            ],
        }


def _measured(table: TableComparison, name: str, equal: object) -> Any:
    if table.reason is not None:
        return None
    return equal if table.difference is None else getattr(table.difference, name)


def compare_with_base(
    checkpoint: Checkpoint, declaration: Declaration, base: Checkpoint, progress: Progress
) -> BaseComparison:
    """Compare the tables of both ends with the base's. Of tables of different lengths the common rows are compared."""
    theirs = stored_ends(base, declaration_of(base))
    tables = compare_ends(checkpoint, stored_ends(checkpoint, declaration), base, theirs, progress)
    return BaseComparison(location=base.location, tables=tables)


@np.errstate(over="ignore", invalid="ignore")  # odd values are compared, and must not raise warnings
def compare_ends(
    checkpoint: Checkpoint,
    ours: Mapping[str, StoredTensor],
    other: Checkpoint,
    theirs: Mapping[str, StoredTensor],
    progress: Progress,
) -> tuple[TableComparison, ...]:
    """Compare the tables of the ends that both have; each table is read once, in blocks."""
    pairs: dict[tuple[StoredTensor, StoredTensor], list[str]] = {}
    for end, tensor in ours.items():
        if end in theirs:
            pairs.setdefault((tensor, theirs[end]), []).append(end)
    progress.expect(sum(mine.nbytes + original.nbytes for mine, original in pairs))
    both = _Both(checkpoint, other)
    return tuple(_compare(both, tuple(ends), *pair, progress) for pair, ends in pairs.items())


def stored_ends(checkpoint: Checkpoint, declaration: Declaration) -> dict[str, StoredTensor]:
    """The stored table of each end; a tied model's one table is that of both."""
    stored = {
        EMBEDDING: checkpoint.tensors.get(declaration.embedding or ""),
        HEAD: checkpoint.tensors.get(declaration.head or ""),
    }
    tie = declaration.find(declaration.head or "")
    if tie is not None and tie.flag.value:
        one = stored[EMBEDDING] or stored[HEAD]
        stored = {end: tensor or one for end, tensor in stored.items()}
    return {end: tensor for end, tensor in stored.items() if tensor is not None}


def _compare(
    both: _Both, ends: tuple[str, ...], ours: StoredTensor, original: StoredTensor, progress: Progress
) -> TableComparison:
    rows, base_rows = (tensor.shape[0] if tensor.shape else 1 for tensor in (ours, original))
    difference, reason = None, _obstacle(ours, original)
    if reason is None:
        common = min(rows, base_rows)
        mine, base = _first_rows(ours, common), _first_rows(_renamed(original), common)
        # the rounding of the coarser dtype is the noise above which a low-rank delta must be seen
        source, target = sorted((mine, base), key=lambda tensor: SPACING.get(tensor.dtype, 0.0), reverse=True)
        (pair,) = scan_tables(both, source, [target], progress).pairs
        difference = explain_difference(both, pair, source)
    return TableComparison(
        ends=ends,
        tensor=ours.name,
        base_tensor=original.name,
        rows=rows,
        base_rows=base_rows,
        difference=difference,
        reason=reason,
    )


def _obstacle(ours: StoredTensor, original: StoredTensor) -> str | None:
    """The reason why two tables cannot be compared, or `None`."""
    for tensor in (ours, original):
        if not can_scan(tensor):
            return f"{tensor.name} is stored as {tensor.dtype}, and only floating-point tables are compared"
    if ours.shape[1:] != original.shape[1:]:
        return f"rows of {list(ours.shape[1:])}, and of {list(original.shape[1:])} in the base"
    return None


def _first_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    if tensor.strides is not None or tensor.shape[0] == rows:
        return tensor._replace(shape=(rows, *tensor.shape[1:]))
    return tensor._replace(shape=(rows, *tensor.shape[1:]), nbytes=tensor.nbytes // tensor.shape[0] * rows)


def _renamed(tensor: StoredTensor) -> StoredTensor:
    return tensor._replace(name=BASE + tensor.name, file=BASE + tensor.file)


class _Both(Checkpoint):
    """Two open checkpoints read as one: the base's tensors have `BASE` in front of their names."""

    def __init__(self, checkpoint: Checkpoint, base: Checkpoint) -> None:
        self.location = checkpoint.location
        self._checkpoint, self._base = checkpoint, base
        self._tensors = {**checkpoint.tensors, **{BASE + name: _renamed(one) for name, one in base.tensors.items()}}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def graph(self) -> None:
        """Of neither: each of the two reads its own tensors."""

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        return self._owner(name).rows(name.removeprefix(BASE), start, stop)

    def read_rows_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._owner(name).read_rows_into(name.removeprefix(BASE), start, buffer)

    def _owner(self, name: str) -> Checkpoint:
        return self._base if name.startswith(BASE) else self._checkpoint
