"""Compares the vocabulary's ends of two checkpoints row by row: before and after an edit, a fine-tune or a merge."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.audit_report import AuditReport, findings_of, select_rules
from bowline.auditing.base_comparison import EMBEDDING, HEAD, TableComparison, compare_with_base, stored_ends
from bowline.auditing.checkpoint_table import CheckpointTable
from bowline.auditing.evidence import Evidence
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.progress import Progress
from bowline.auditing.row_scan import can_scan, check_extent
from bowline.auditing.verdict import verdict
from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.geometry import RowChanges, row_changes
from bowline.markup import Tone, html_report
from bowline.tie import TieState
from bowline.wording import joined

if TYPE_CHECKING:  # the layouts are loaded when a tensor stands beside a weight
    from bowline.checkpoint.formats.quantised import QuantisedWeight

__all__ = ["COMPARISON_VERSION", "ComparisonReport", "EndComparison", "RowPairs", "compare", "compare_open"]

COMPARISON_VERSION = 1
MOST_NAMED = 20
"""Rows that a report names: those that moved most."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPairs:
    """The pairs of rows of two vocabularies, and the rows without a partner.

    by: "id", or "token" where the tokenizers give a token different ids.
    before, after: the ids of each pair, in ascending order of `before`.
    only_before, only_after: the ids without a partner.
    renamed: the ids of pairs by id whose row has another token after.
    """

    by: str
    before: Ids
    after: Ids
    only_before: Ids
    only_after: Ids
    renamed: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndComparison:
    """One table of the first checkpoint beside the second's table for the same `ends`.

    `changes` has an entry for each pair of rows; `None` if `reason` says why they were not compared. `pattern` is what
    the difference looks like, such as a merged low-rank delta; empty if like nothing known.
    """

    ends: tuple[str, ...]
    before: StoredTensor
    after: StoredTensor
    pairs: RowPairs
    changes: RowChanges | None
    reason: str | None
    pattern: str

    @property
    def moved(self) -> Ids:
        """The places in `pairs` of the rows that differ, those that moved most first."""
        if self.changes is None:
            return np.empty(0, np.int64)
        far = np.nan_to_num(self.changes.relative, nan=np.inf)
        order = np.argsort(-far, kind="stable")
        return order[~self.changes.same[order]]

    def as_dict(self, tokens: Mapping[int, str]) -> dict[str, Any]:
        """The entry of the JSON report; `tokens` are those of the first checkpoint by id."""
        changes, moved = self.changes, self.moved
        finite = changes.relative[moved][np.isfinite(changes.relative[moved])] if changes is not None else np.empty(0)
        return {
            "ends": list(self.ends),
            "before": {"tensor": self.before.name, "shape": list(self.before.shape), "dtype": self.before.dtype},
            "after": {"tensor": self.after.name, "shape": list(self.after.shape), "dtype": self.after.dtype},
            "pairs": int(self.pairs.before.size),
            "moved": int(moved.size) if changes is not None else None,
            "median_relative_change": float(np.median(finite)) if finite.size else None,
            "looks_like": self.pattern or None,
            "reason": self.reason,
            "rows": [
                {
                    "before": int(self.pairs.before[at]),
                    "after": int(self.pairs.after[at]),
                    "token": tokens.get(int(self.pairs.before[at])),
                    "distance": _finite(changes.distance[at]),
                    "relative": _finite(changes.relative[at]),
                    "cosine": _finite(changes.cosine[at]),
                }
                for at in moved[:MOST_NAMED]
            ]
            if changes is not None
            else [],
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparisonReport:
    """Two checkpoints: the audit of each, which rows belong together, and how far each row of each end moved.

    `quantised` says in a sentence each which ends were not compared because they are stored as codes.
    """

    before: AuditReport
    after: AuditReport
    pairs: RowPairs
    ends: tuple[EndComparison, ...]
    quantised: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if every row of both vocabularies has an equal partner in each end, and both ends are stored alike."""
        compared = all(end.changes is not None for end in self.ends)
        return bool(self.ends) and compared and not self.quantised and not self.different

    @property
    def different(self) -> bool:
        """True if a difference was found. If `equal` is false too, not everything was compared."""
        states = [
            tie.state if tie is not None else None
            for tie in (self.before.evidence.main_tie, self.after.evidence.main_tie)
        ]
        alone = self.pairs.only_before.size or self.pairs.only_after.size
        moved = any(end.moved.size or end.before.shape[1:] != end.after.shape[1:] for end in self.ends)
        return bool(alone) or moved or states[0] is not states[1]

    def tokens(self, evidence: Evidence) -> dict[int, str]:
        """The tokens of one of the two checkpoints by id."""
        return {number: token for token, number in evidence.tokenizer.ids.items()} if evidence.tokenizer else {}

    def as_dict(self) -> dict[str, Any]:
        """The comparison for machines."""
        tokens = self.tokens(self.before.evidence)
        return {
            "version": COMPARISON_VERSION,
            "equal": self.equal,
            "before": {"path": self.before.evidence.location, "verdict": verdict(self.before.evidence)},
            "after": {"path": self.after.evidence.location, "verdict": verdict(self.after.evidence)},
            "paired_by": self.pairs.by,
            "only_before": self.pairs.only_before.tolist(),
            "only_after": self.pairs.only_after.tolist(),
            "renamed": self.pairs.renamed.tolist(),
            "ends": [end.as_dict(tokens) for end in self.ends],
            "quantised": list(self.quantised),
        }

    def _repr_html_(self) -> str:
        """Both verdicts and the number of rows that moved, as a notebook shows it."""
        rows = [
            (
                Tone.NEUTRAL if end.changes is None or not end.moved.size else Tone.DOUBTFUL,
                " and ".join(end.ends),
                (
                    end.before.name,
                    end.after.name,
                    end.reason or f"{end.moved.size} of {end.pairs.before.size} rows moved",
                ),
            )
            for end in self.ends
        ]
        title = f"{self.before.evidence.location}, {self.after.evidence.location}"
        tone = Tone.GOOD if self.equal else Tone.DOUBTFUL
        return html_report(
            title, "equal" if self.equal else "different", tone, ("end", "before", "after", "rows"), rows
        )


def compare(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, progress: Progress | None = None
) -> ComparisonReport:
    """Compare embedding and head of two checkpoints, in the forms that `audit` takes.

    Rows are paired by id, or by token if both have a tokenizer and a token has another id in each, as after a pruning.
    The distance of a pair is ||b - a||, also in units of ||a||, and the cosine is that of a and b.

    Raises:
        CheckpointError: one of them cannot be read.

    Example:
        >>> report = compare("gpt2", "gpt2-tuned")  # doctest: +SKIP
        >>> report.ends[0].moved.size, report.equal  # doctest: +SKIP
        (812, False)
    """
    with open_checkpoint(before) as first, open_checkpoint(after) as second:
        return compare_open(first, second, progress=progress)


def compare_open(before: Checkpoint, after: Checkpoint, *, progress: Progress | None = None) -> ComparisonReport:
    """The same of two checkpoints that are open."""
    progress = progress or Progress()
    rules = select_rules(adapters=False)
    evidences = [gather(checkpoint, progress=progress) for checkpoint in (before, after)]
    reports = [AuditReport(evidence=evidence, findings=findings_of(evidence, rules)) for evidence in evidences]
    first, second = (
        stored_ends(one, evidence.declaration) for one, evidence in zip((before, after), evidences, strict=True)
    )
    codes = [_quantised(evidence, ends) for evidence, ends in zip(evidences, (first, second), strict=True)]
    lengths = [
        max(
            [*map(_length, ends.values()), *(weight.shape[0] for weight in quantised.values() if weight.shape)],
            default=0,
        )
        for ends, quantised in zip((first, second), codes, strict=True)
    ]
    pairs = _pairs(evidences[0], evidences[1], lengths[0], lengths[1])
    tables: dict[tuple[StoredTensor, StoredTensor], list[str]] = {}
    for end, tensor in first.items():
        if end in second:
            tables.setdefault((tensor, second[end]), []).append(end)
    patterns = _patterns(before, after, evidences[1]) if pairs.by == "id" else {}
    ends = tuple(
        _compare(before, after, tuple(names), *both, pairs, patterns.get(both[1].name, ""))
        for both, names in tables.items()
    )
    quantised = tuple(
        f"{joined(tuple(found))}: {label}, {weight.name} is stored as {weight.layout}, and only floating-point tables "
        "are compared"
        for label, found in zip(("before", "after"), codes, strict=True)
        for weight in list(found.values())[:1]
    )
    return ComparisonReport(before=reports[0], after=reports[1], pairs=pairs, ends=ends, quantised=quantised)


def _quantised(evidence: Evidence, stored: Mapping[str, StoredTensor]) -> dict[str, QuantisedWeight]:
    """The ends that are stored as codes."""
    tie = evidence.main_tie
    if tie is None or tie.quantised is None:
        return {}
    source, target = tie.quantised.source, tie.quantised.target
    if tie.state is TieState.SHARED:
        source, target = source or target, target or source
    ends = {EMBEDDING: source, HEAD: target}
    return {end: weight for end, weight in ends.items() if weight is not None and end not in stored}


def _compare(
    before: Checkpoint,
    after: Checkpoint,
    ends: tuple[str, ...],
    first: StoredTensor,
    second: StoredTensor,
    pairs: RowPairs,
    pattern: str,
) -> EndComparison:
    changes, reason = None, _obstacle(first, second)
    within = (pairs.before < _length(first)) & (pairs.after < _length(second))
    shared = RowPairs(
        by=pairs.by,
        before=pairs.before[within],
        after=pairs.after[within],
        only_before=pairs.only_before,
        only_after=pairs.only_after,
        renamed=pairs.renamed,
    )
    if reason is None:
        changes = row_changes(
            CheckpointTable(before, first, Progress()),
            CheckpointTable(after, second, Progress()),
            before_rows=shared.before,
            after_rows=shared.after,
        )
    return EndComparison(
        ends=ends, before=first, after=second, pairs=shared, changes=changes, reason=reason, pattern=pattern
    )


def _patterns(before: Checkpoint, after: Checkpoint, evidence: Evidence) -> dict[str, str]:
    """The operation that each table's difference looks like, if it looks like one."""
    compared: tuple[TableComparison, ...] = compare_with_base(after, evidence.declaration, before, Progress()).tables
    return {
        table.tensor: str(table.difference)
        for table in compared
        if table.difference is not None and table.difference.has_pattern
    }


def _obstacle(first: StoredTensor, second: StoredTensor) -> str | None:
    """The reason why two tables cannot be compared, or `None`."""
    for tensor in (first, second):
        if tensor.nbytes == 0:
            return f"{tensor.name} has the shape {list(tensor.shape)}, expected rows"
        if not can_scan(tensor):
            return f"{tensor.name} is stored as {tensor.dtype}, and only floating-point tables are compared"
        if len(tensor.shape) != 2:
            return f"{tensor.name} has the shape {list(tensor.shape)}, expected rows"
        check_extent(tensor)
    if first.shape[1] != second.shape[1]:
        return f"rows of {first.shape[1]} values and of {second.shape[1]}"
    return None


def _pairs(before: Evidence, after: Evidence, rows_before: int, rows_after: int) -> RowPairs:
    by, common = "id", min(rows_before, rows_after)
    first = second = np.arange(common)
    renamed: Iterable[int] = ()
    if before.tokenizer is not None and after.tokenizer is not None:
        ours, theirs = before.tokenizer.ids, after.tokenizer.ids
        shared = [(number, theirs[token]) for token, number in ours.items() if token in theirs]
        held = [(one, other) for one, other in shared if one < rows_before and other < rows_after]
        if any(one != other for one, other in held):
            by = "token"
            paired = np.array(sorted(held), np.int64).reshape(-1, 2)
            first, second = paired[:, 0], paired[:, 1]
        else:
            kept, taken = {one for one, other in held if one == other}, set(theirs.values())
            renamed = (one for one in ours.values() if 0 <= one < common and one in taken and one not in kept)
    return RowPairs(
        by=by,
        before=first,
        after=second,
        only_before=np.setdiff1d(np.arange(rows_before), first),
        only_after=np.setdiff1d(np.arange(rows_after), second),
        renamed=np.unique(np.fromiter(renamed, np.int64)),
    )


def _length(tensor: StoredTensor) -> int:
    return tensor.shape[0] if tensor.shape else 0


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
