"""Reads each vocabulary table once, together with the tables that are tied to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import nan, prod

import numpy as np
import numpy.typing as npt

from bowline.auditing.checkpoint_table import CheckpointTable
from bowline.auditing.difference import ROWS_NAMED, Cause, TableDifference, explain_difference
from bowline.auditing.evidence import TieEvidence, compare_headers
from bowline.auditing.progress import Progress
from bowline.auditing.quantised_state import with_quantised_ends
from bowline.auditing.row_sampling import take
from bowline.auditing.row_scan import PairScan, RowScan, can_scan, check_extent, scan_tables
from bowline.auditing.row_statistics import PaddingRow, TableRows, classify_padding, describe_table
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.gguf.ggml_types import BLOCKS
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.families.declaration import Declaration
from bowline.families.gguf_names import GGUF_PADDING
from bowline.families.transformers_table import lookup
from bowline.geometry import GeometryReport, describe, spectrum_rows
from bowline.tie import Tie, TieState

__all__ = ["TablesRead", "read_tables", "sampled_table"]

LARGEST_MASK = 16 << 20
INITIAL_STD = ("initializer_range", "init_std", "initializer_factor")
"""Config keys for the standard deviation that embeddings are drawn with."""
BYTES_AT_ONCE = 1 << 20
LARGEST_NUMBER = 2**53
"""Larger numbers in a config are ignored, and so is NaN: no id and no initializer range is that large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesRead:
    """The evidence that comes from the values of the tables."""

    ties: tuple[TieEvidence, ...]
    tables: tuple[TableRows, ...]
    padding: PaddingRow | None
    geometry: GeometryReport | None
    odd_bools: tuple[str, ...]


@np.errstate(over="ignore", invalid="ignore")  # odd values are described, and must not raise warnings
def read_tables(checkpoint: Checkpoint, declaration: Declaration, progress: Progress) -> TablesRead:
    """Scan the embedding, the head, and every other pair of tied tensors."""
    tensors = checkpoint.tensors
    by_headers = [
        compare_headers(tensors, declared, complete=checkpoint.complete, graph=checkpoint.graph)
        for declared in declaration.ties
    ]
    by_headers = [with_quantised_ends(checkpoint, tie, values=True) for tie in by_headers]
    scans: dict[str, RowScan] = {}
    pairs: dict[Tie, PairScan] = {}  # a target can have another source in each version
    groups = _groups(by_headers, declaration, tensors)
    embedding = tensors.get(declaration.embedding or "")
    described = embedding if embedding in groups and len(embedding.shape) == 2 else None
    to_read = [tensor for source, targets in groups.items() for tensor in (source, *targets)]
    progress.expect(sum(tensor.nbytes for tensor in to_read) + (described.nbytes if described else 0))
    for source, targets in groups.items():
        scan = scan_tables(checkpoint, source, targets, progress)
        scans[source.name] = scan.rows
        pairs.update((Tie(pair.tensor.name, source.name), pair) for pair in scan.pairs)
    ties = tuple(_settle(checkpoint, tie, pairs) for tie in by_headers)
    for tie in ties:  # an untied head has rows of its own to describe
        pair = pairs.get(tie.tie)
        if tie.target is not None and tie.target.name not in scans and _has_own_rows(tie) and can_scan(tie.target):
            scans[tie.target.name] = pair.rows if pair else scan_tables(checkpoint, tie.target).rows
    spread = next((found for key in INITIAL_STD if (found := _number(checkpoint, key))), None)
    tables = tuple(describe_table(checkpoint, scan) for scan in scans.values() if len(scan.tensor.shape) == 2)
    main = embedding if embedding is not None and embedding.name in scans else None
    if main is None or len(main.shape) != 2:
        return TablesRead(ties=ties, tables=tables, padding=None, geometry=None, odd_bools=_odd_bools(checkpoint))
    table = next(table for table in tables if table.name == main.name)
    return TablesRead(
        ties=ties,
        tables=tables,
        padding=_padding(checkpoint, scans[main.name], table, spread),
        geometry=describe(CheckpointTable(checkpoint, main, progress if described else Progress())),
        odd_bools=_odd_bools(checkpoint),
    )


def _odd_bools(checkpoint: Checkpoint) -> tuple[str, ...]:
    """BOOL tensors with a byte that is neither 0 nor 1, of those up to `LARGEST_MASK` bytes."""
    found = []
    for tensor in checkpoint.tensors.values():
        if tensor.dtype == "BOOL" and tensor.strides is None and 0 < tensor.nbytes <= LARGEST_MASK:
            raw = np.empty(tensor.nbytes, np.uint8)
            checkpoint.read_rows_into(tensor.name, 0, raw.data)
            if int(raw.max()) > 1:
                found.append(tensor.name)
    return tuple(found)


def _groups(
    ties: Iterable[TieEvidence], declaration: Declaration, tensors: Mapping[str, StoredTensor]
) -> dict[StoredTensor, list[StoredTensor]]:
    """Each table to read, with the stored targets of the same shape; two ends on one storage are read once."""
    groups: dict[StoredTensor, list[StoredTensor]] = {}
    codes = {table.name for tie in ties if tie.quantised for table in tie.quantised.tables}
    for name in (declaration.embedding, declaration.head):
        tensor = tensors.get(name or "")
        tied = any(tie.tie.target == name and tie.source is not None for tie in ties)
        if tensor is not None and can_scan(tensor) and not tied and name not in codes:
            groups.setdefault(tensor, [])
    for tie in ties:
        if tie.quantised is not None:
            continue
        if tie.target is None or tie.source is None or not (can_scan(tie.target) and can_scan(tie.source)):
            continue
        beside = groups.setdefault(tie.source, [])
        if tie.target.shape == tie.source.shape and not tie.target.same_storage(tie.source):
            beside.append(tie.target)
    return groups


def _settle(checkpoint: Checkpoint, tie: TieEvidence, pairs: Mapping[Tie, PairScan]) -> TieEvidence:
    if tie.unseen:
        return tie
    pair = pairs.get(tie.tie)
    if pair is None or tie.source is None:
        if tie.state is None:  # quantised codes: only their bytes can be compared
            return _settle_by_bytes(checkpoint, tie)
        return tie
    difference = explain_difference(checkpoint, pair, tie.source)
    state = tie.state or (TieState.EQUAL if difference is None else TieState.DIVERGED)
    cast = tie.state is TieState.INCOMPATIBLE and pair.equal_in_shorter
    return replace(tie, state=state, difference=difference, has_nan=pair.has_nan, equal_when_cast=cast)


def _settle_by_bytes(checkpoint: Checkpoint, tie: TieEvidence) -> TieEvidence:
    assert tie.target is not None and tie.source is not None
    if tie.target.dtype != tie.source.dtype:  # in GGUF: two types, of which one at least is not dequantised
        return tie
    in_blocks = tie.target.dtype in BLOCKS
    if not in_blocks and prod(tie.target.shape[1:]) * BITS[tie.target.dtype] % 8:
        return tie  # rows that end within a byte are not compared
    if not tie.target.nbytes:
        return replace(tie, state=TieState.EQUAL)
    check_extent(tie.target)
    rows = tie.target.shape[0] if tie.target.shape else 1
    step = max(1, BYTES_AT_ONCE * rows // max(1, tie.target.nbytes))
    where: list[int] = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        left, right = (_raw_rows(checkpoint, tensor, start, stop) for tensor in (tie.target, tie.source))
        where.extend(int(row) + start for row in np.flatnonzero((left != right).any(axis=1)))
    if not where:
        return replace(tie, state=TieState.EQUAL)
    difference = TableDifference(
        rows_differing=len(where),
        some_rows=tuple(where[:ROWS_NAMED]),
        max_abs_difference=nan,  # the scale of the codes is not known
        cause=Cause.ALL_ROWS if len(where) == rows else Cause.SOME_ROWS,
    )
    return replace(tie, state=TieState.DIVERGED, difference=difference)


def _raw_rows(checkpoint: Checkpoint, tensor: StoredTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """The bytes of each row, not decoded, so that codes of any dtype can be compared."""
    if tensor.strides is not None:
        return np.ascontiguousarray(checkpoint.rows(tensor.name, start, stop)).reshape(stop - start, -1).view(np.uint8)
    raw = np.empty((stop - start, tensor.nbytes // max(1, tensor.shape[0] if tensor.shape else 1)), np.uint8)
    if raw.size:
        checkpoint.read_rows_into(tensor.name, start, raw.reshape(-1).data)
    return raw


def _has_own_rows(tie: TieEvidence) -> bool:
    own = tie.state in (TieState.DIVERGED, TieState.INCOMPATIBLE, TieState.SOURCE_MISSING)
    return own and (tie.quantised is None or tie.quantised.target is None)


def _padding(checkpoint: Checkpoint, scan: RowScan, table: TableRows, spread: float | None) -> PaddingRow | None:
    pad = _number(checkpoint, "pad_token_id" if checkpoint.gguf is None else GGUF_PADDING)
    if pad is None or pad != int(pad) or not 0 <= pad < table.rows:
        return None
    return classify_padding(checkpoint, scan, table, int(pad), spread)


def _number(checkpoint: Checkpoint, key: str) -> float | None:
    """The number that the config has for `key`, at the top or in its text config; `None` without one."""
    config = checkpoint.config or {}
    for path in (key, f"text_config.{key}"):
        value = config[path] if path in config else lookup(config, path)  # GGUF's keys have dots in them
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER:
            return value
    return None


def sampled_table(checkpoint: Checkpoint, tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """The rows of a table (V, D) from which `describe` computes its Gram matrix: all, or a sample of a large table."""
    rows, columns = tensor.shape
    chosen = spectrum_rows(rows, columns)
    return take(checkpoint, tensor, np.arange(rows) if chosen is None else chosen)
