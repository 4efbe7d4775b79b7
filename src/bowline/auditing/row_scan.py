"""Scans the rows of a vocabulary table once, together with the tables that are tied to it.

The scan runs on the stored bit patterns: the largest magnitude of a row, as bits, identifies zero, infinite and NaN
rows without decoding a value, and rows of equal bytes are compared no further. Values are decoded for norms and where
two tables differ. Blocks fit the processor's cache, and each thread has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from threading import Event, Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.progress import Progress
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.gguf.ggml_types import DEQUANTISED
from bowline.checkpoint.formats.graphs import SCALED
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

__all__ = ["PairScan", "RowScan", "Scan", "can_scan", "check_extent", "scan_tables"]

BLOCK_BYTES = 512 << 10
NORM_ELEMENTS = 96 << 20
"""Above this number of elements, row norms are estimated from `NORM_COLUMNS` columns."""
NORM_COLUMNS = 256
MOST_THREADS = 8
SKETCH_BITS = 64
SKETCH_COLUMNS = 128
"""A sketch is made from at most this many columns, because it only has to find the rows to compare in full."""
SKETCH_SAMPLE = 64
"""Rows from which the mean direction of a table is estimated."""
SERIAL_PRODUCT = 1 << 18
"""A product of so many multiplications is computed by one thread in OpenBLAS."""
FEWEST_COLUMNS = 16
"""Rows shorter than this can point in one direction by chance, so they have no sketch."""
MOST_ROWS = 1 << 24
MOST_COLUMNS = 1 << 22
"""Limits far above any vocabulary's table, because a sparse file of zeros can claim any size."""

INFINITY_BITS = {
    "F64": 0x7FF0000000000000,
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,  # no infinity: this one pattern is NaN
}
"""A magnitude of at least this is not finite. Only these dtypes are scanned; others hold codes, not values."""
NAN_BITS = {dtype: bits + (dtype != "F8_E4M3") for dtype, bits in INFINITY_BITS.items()}
"""A magnitude of at least this is NaN."""

Words = npt.NDArray[np.unsignedinteger[Any]]
Values = npt.NDArray[Any]


@dataclass(slots=True, kw_only=True)
class RowScan:
    """The scan of one table, with an entry per row: magnitude bits, a fingerprint of the bytes, the norm, a sketch."""

    tensor: StoredTensor
    largest_bits: Words
    fingerprint: npt.NDArray[np.uint64]
    square_norm: npt.NDArray[np.float32]
    sketch: npt.NDArray[np.uint64]
    """Signs of `SKETCH_BITS` random projections of the row's direction; similar rows have most bits in common."""
    norm_columns: int | None
    """The number of columns that the norms were estimated from; `None` when all were read."""

    @property
    def zero(self) -> npt.NDArray[np.bool_]:
        """Rows of zeros, of either sign."""
        found: npt.NDArray[np.bool_] = self.largest_bits == 0
        return found

    @property
    def not_finite(self) -> npt.NDArray[np.bool_]:
        """Rows with an infinite value or a NaN."""
        found: npt.NDArray[np.bool_] = self.largest_bits >= INFINITY_BITS[_scanned_dtype(self.tensor)]
        return found

    @property
    def has_nan(self) -> npt.NDArray[np.bool_]:
        """Rows with a NaN."""
        found: npt.NDArray[np.bool_] = self.largest_bits >= NAN_BITS[_scanned_dtype(self.tensor)]
        return found

    @property
    def largest(self) -> npt.NDArray[np.float64]:
        """The largest magnitude of each row."""
        with np.errstate(invalid="ignore"):
            values = decoded(self.largest_bits.reshape(-1, 1), _scanned_dtype(self.tensor))
        return values.reshape(-1).astype(np.float64)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that have an entry per row."""
        return self.largest_bits, self.fingerprint, self.square_norm, self.sketch

    @property
    def norm(self) -> npt.NDArray[np.float32]:
        """Euclidean norms, estimated for a large table."""
        columns = prod(self.tensor.shape[1:])
        scale = 1.0 if self.norm_columns is None else columns / self.norm_columns
        with np.errstate(invalid="ignore"):
            norm: npt.NDArray[np.float32] = np.sqrt(self.square_norm * np.float32(scale))
        return norm


@dataclass(slots=True, kw_only=True)
class PairScan:
    """The rows in which a table differs from the one that it is tied to, and by how much."""

    tensor: StoredTensor
    rows: RowScan
    differs: npt.NDArray[np.bool_]
    max_abs_difference: float = 0.0
    has_nan: bool = False
    equal_in_shorter: bool = True
    """Whether the values agree once both are rounded to the shorter of two dtypes."""
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A table, and its comparison with each other table of the same shape."""

    rows: RowScan
    pairs: tuple[PairScan, ...]


def can_scan(tensor: StoredTensor) -> bool:
    """Whether the tensor is a table (or vector) of floating-point values and is not empty."""
    return _scanned_dtype(tensor) in INFINITY_BITS and bool(tensor.shape) and tensor.nbytes > 0


def check_extent(tensor: StoredTensor) -> None:
    """Raise `FormatError` for a table with more than `MOST_ROWS` rows or `MOST_COLUMNS` columns."""
    if tensor.shape and (tensor.shape[0] > MOST_ROWS or prod(tensor.shape[1:]) > MOST_COLUMNS):
        raise FormatError(
            f"{tensor.file}: {shown(tensor.name)} has the shape {list(tensor.shape)}, expected a vocabulary table "
            f"of at most {MOST_ROWS} rows of {MOST_COLUMNS}",
            help="audit it with --headers-only, or name the file that holds the model",
        )


def scan_tables(
    checkpoint: Checkpoint,
    first: StoredTensor,
    others: Sequence[StoredTensor] = (),
    progress: Progress | None = None,
) -> Scan:
    """Scan `first`, and compare each of `others` (of the same shape) with it; each tensor is read once.

    Raises `FormatError` for a table larger than the limits of `check_extent`.
    """
    check_extent(first)
    per_row = sum(tensor.nbytes for tensor in (first, *others)) // max(1, first.shape[0])
    rows, columns = first.shape[0], prod(first.shape[1:])
    scan = Scan(
        rows=_empty_scan(first),
        pairs=tuple(
            PairScan(tensor=other, rows=_empty_scan(other), differs=np.zeros(rows, np.bool_)) for other in others
        ),
    )
    step = max(1, BLOCK_BYTES * 8 // max(1, columns * BITS[_scanned_dtype(first)]))
    sketcher = _Sketcher.of_table(_Reader(checkpoint, first, 1)) if columns >= FEWEST_COLUMNS else None

    stopping = Event()

    def scan_range(start: int, stop: int) -> None:
        table = _Reader(checkpoint, first, step)
        beside = [_Reader(checkpoint, other, step) for other in others]
        for at in range(start, stop, step):
            if stopping.is_set():
                return
            end = min(at + step, stop)
            words = table.words(at, end)
            _describe_rows(scan.rows, table, words, at, end, sketcher)
            for pair, reader in zip(scan.pairs, beside, strict=True):
                _compare_rows(pair, scan.rows, table, words, reader, at, end, sketcher)
            if progress is not None:
                progress.advance((end - at) * per_row)

    _in_ranges(rows, step, scan_range, stopping)
    return scan


def _empty_scan(tensor: StoredTensor) -> RowScan:
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    return RowScan(
        tensor=tensor,
        largest_bits=np.zeros(rows, _word_type(tensor)),
        fingerprint=np.zeros(rows, np.uint64),
        square_norm=np.zeros(rows, np.float32),
        sketch=np.zeros(rows, np.uint64),
        norm_columns=None if rows * columns <= NORM_ELEMENTS or columns <= NORM_COLUMNS else NORM_COLUMNS,
    )


class _Reader:
    """Reads blocks of one tensor as bit patterns, `(n, columns)`, into a buffer that every block reuses."""

    def __init__(self, checkpoint: Checkpoint, tensor: StoredTensor, step: int) -> None:
        self.checkpoint = checkpoint
        self.tensor = tensor
        self.columns = prod(tensor.shape[1:])
        self._type = _word_type(tensor)
        stored_as_scanned = tensor.strides is None and tensor.dtype not in DEQUANTISED and tensor.dtype not in SCALED
        self._buffer = np.empty(step * self.columns, self._type) if stored_as_scanned else None

    def words(self, start: int, stop: int) -> Words:
        if self._buffer is None:
            rows = np.ascontiguousarray(self.checkpoint.rows(self.tensor.name, start, stop))
            return rows.reshape(stop - start, self.columns).view(self._type)
        block = self._buffer[: (stop - start) * self.columns]
        if block.size:
            self.checkpoint.read_rows_into(self.tensor.name, start, block.view(np.uint8).data)
        return block.reshape(stop - start, self.columns)

    def values(self, words: Words) -> Values:
        """The numbers that the bit patterns encode."""
        return decoded(words, _scanned_dtype(self.tensor))


def decoded(words: Words, dtype: str) -> Values:
    """The numbers that bit patterns encode, exact, in float32 or wider."""
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F64":
        return words.view(np.float64)
    if dtype == "BF16":
        return np.left_shift(words, 16, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return decode(np.ascontiguousarray(words).view(np.uint8), dtype, words.shape).astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class _Sketcher:
    """Makes the sketches of rows (Charikar 2002): for each of 64 random vectors, on which side of the mean a row lies.

    The share of bits in which two rows differ is about the angle between them, seen from the mean direction of the
    table, over pi.
    """

    planes: npt.NDArray[np.float32]
    """The random vectors, `(columns, SKETCH_BITS)`."""
    mean: npt.NDArray[np.float32]
    """The projections of the mean direction, `(SKETCH_BITS,)`."""

    @classmethod
    def of_table(cls, reader: _Reader) -> _Sketcher:
        """A sketcher for a table, whose mean direction it estimates from `SKETCH_SAMPLE` rows."""
        columns = min(reader.columns, NORM_COLUMNS, SKETCH_COLUMNS)
        planes = np.random.default_rng(0).standard_normal((columns, SKETCH_BITS), np.float32)
        rows = reader.tensor.shape[0]
        total, count = np.zeros(len(planes)), 0
        with np.errstate(invalid="ignore", over="ignore"):
            for row in np.linspace(0, rows - 1, min(SKETCH_SAMPLE, rows)).astype(np.int64):
                values = reader.values(reader.words(int(row), int(row) + 1))[0, : len(planes)].astype(np.float64)
                length = np.linalg.norm(values)
                if np.isfinite(length) and length > 0:
                    total += values / length
                    count += 1
        return cls(planes, (total / max(1, count)).astype(np.float32) @ planes)

    def sketch(self, values: Values) -> npt.NDArray[np.uint64]:
        """The sketches of rows (n, columns); of no meaning where a row is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            head = values[:, : len(self.planes)].astype(np.float32, copy=False)
            length = np.sqrt(np.vecdot(head, head))
            sides = self._project(head) > length[:, None] * self.mean
        return np.packbits(sides, axis=1).view(np.uint64).reshape(len(values))

    def _project(self, head: Values) -> Values:
        """`head @ planes`, in products so small that the BLAS starts no threads beside those of the scan."""
        out = np.empty((len(head), SKETCH_BITS), np.float32)
        step = max(1, SERIAL_PRODUCT // self.planes.size)
        whole = len(head) // step * step
        np.matmul(
            head[:whole].reshape(-1, step, len(self.planes)),
            self.planes,
            out=out[:whole].reshape(-1, step, SKETCH_BITS),
        )
        np.matmul(head[whole:], self.planes, out=out[whole:])
        return out


def _describe_rows(
    scan: RowScan, reader: _Reader, words: Words, start: int, stop: int, sketcher: _Sketcher | None
) -> None:
    scan.largest_bits[start:stop] = np.bitwise_and(words, _magnitude(words)).max(axis=1, initial=0)
    scan.fingerprint[start:stop] = _wide_words(words).sum(axis=1, dtype=np.uint64)
    values = reader.values(words if scan.norm_columns is None else words[:, : scan.norm_columns])
    with np.errstate(invalid="ignore", over="ignore"):
        scan.square_norm[start:stop] = np.vecdot(values, values)
    if sketcher is not None:
        scan.sketch[start:stop] = sketcher.sketch(values)


@np.errstate(invalid="ignore", over="ignore")
def _compare_rows(
    pair: PairScan,
    first: RowScan,
    reader: _Reader,
    words: Words,
    other: _Reader,
    start: int,
    stop: int,
    sketcher: _Sketcher | None,
) -> None:
    """Compare a block with its partner: by bits where they decide, by values where they do not."""
    beside = other.words(start, stop)
    block = slice(start, stop)
    same_bits = _scanned_dtype(reader.tensor) == _scanned_dtype(other.tensor)
    if same_bits and np.array_equal(_wide_words(words), _wide_words(beside)):
        for mine, theirs in zip(pair.rows.columns(), first.columns(), strict=True):
            mine[block] = theirs[block]
        if first.has_nan[block].any():
            pair.has_nan = True
        return
    _describe_rows(pair.rows, other, beside, start, stop, sketcher)
    not_finite = first.not_finite[block] | pair.rows.not_finite[block]
    if same_bits:
        apart = np.bitwise_and(np.bitwise_xor(words, beside), _magnitude(words)).max(axis=1, initial=0) > 0
        by_value = not_finite | ~apart  # zeros of either sign are equal, and so are NaNs
    else:
        apart, by_value = np.zeros(stop - start, np.bool_), np.ones(stop - start, np.bool_)
    if by_value.any():
        apart[by_value] = _differing(reader.values(words[by_value]), other.values(beside[by_value]))
    pair.differs[block] = apart
    nan = bool(first.has_nan[block].any() or pair.rows.has_nan[block].any())
    dtypes = {reader.tensor.dtype, other.tensor.dtype}
    can_be_rounded = len(dtypes) > 1 and dtypes <= BITS.keys()  # not to a type of GGUF's blocks
    shorter = min(dtypes, key=lambda dtype: BITS[dtype]) if can_be_rounded else None
    alike = shorter is None or np.array_equal(
        rounded(reader.values(words), shorter), rounded(other.values(beside), shorter)
    )
    # Two rows differ by no more than the sum of their largest magnitudes: for most rows that bound is enough.
    bound = first.largest[block] + pair.rows.largest[block]
    open_rows = apart & (not_finite | (bound > pair.max_abs_difference))
    largest = _largest_distance(reader.values(words[open_rows]), other.values(beside[open_rows]))
    with pair.lock:
        pair.has_nan = pair.has_nan or nan
        pair.max_abs_difference = max(pair.max_abs_difference, largest)
        pair.equal_in_shorter = pair.equal_in_shorter and alike


def _differing(left: Values, right: Values) -> npt.NDArray[np.bool_]:
    """Rows that differ in a value; NaN counts as equal to NaN."""
    differing: npt.NDArray[np.bool_] = ((left != right) & ~(np.isnan(left) & np.isnan(right))).any(axis=1)
    return differing


def _largest_distance(left: Values, right: Values) -> float:
    """The largest finite |left - right|, exact: float32 finds the candidates, float64 decides."""
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(np.subtract(left, right))
        largest = near.max(initial=0.0)
        if not np.isfinite(largest):
            distance = np.abs(np.subtract(left, right, dtype=np.float64))
            return float(distance.max(initial=0.0, where=np.isfinite(distance)))
        if near.dtype == np.float64 or not largest:
            return float(largest)
        candidates = near >= largest * np.float32(1 - 2.0**-20)
        return float(np.abs(np.subtract(left[candidates], right[candidates], dtype=np.float64)).max())


def _magnitude(words: Words) -> Any:
    """A mask of all bits except the sign."""
    return words.dtype.type(np.iinfo(words.dtype).max >> 1)


def rounded(values: Values, dtype: str) -> Values:
    """Values rounded to a shorter floating-point dtype: to nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).astype(np.float32)
        single = values.astype(np.float32)
    if dtype != "BF16":
        return single
    bits = single.view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    short: Values = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(single), single, short)  # a NaN of all ones would wrap around to zero


def _wide_words(words: Words) -> Words:
    """The same bytes as 64-bit words if the row length allows it, which is faster."""
    row_bytes = words.shape[1] * words.dtype.itemsize
    return words.view(np.uint64) if row_bytes and row_bytes % 8 == 0 and words.flags.c_contiguous else words


def _scanned_dtype(tensor: StoredTensor) -> str:
    """The dtype of the scanned bits. Strided tensors are decoded first: to float32 where numpy lacks their dtype.

    So are tables of GGUF's blocks, and codes that an ONNX graph dequantises.
    """
    if (tensor.dtype in DEQUANTISED and len(tensor.shape) > 1) or tensor.dtype in SCALED:
        return "F32"
    if tensor.strides is not None and tensor.dtype not in ("F64", "F32", "F16"):
        return "F32" if tensor.dtype in INFINITY_BITS else tensor.dtype
    return tensor.dtype


def _word_type(tensor: StoredTensor) -> np.dtype[Any]:
    return np.dtype(f"<u{BITS[_scanned_dtype(tensor)] // 8}")


def _in_ranges(rows: int, step: int, work: Callable[[int, int], None], stopping: Event) -> None:
    """Split `rows` among threads in whole blocks; numpy and disk reads release the interpreter lock.

    An error or an interrupt sets `stopping`. `work` checks it, so that the other threads stop early.
    """
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1, rows // (4 * step)))
    if threads == 1:
        work(0, rows)
        return
    share = -(-rows // threads // step) * step
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(work, at, min(at + share, rows)) for at in range(0, rows, share)]:
                done.result()
        except BaseException:
            stopping.set()
            raise
