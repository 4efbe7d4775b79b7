"""What a tensor of the edited checkpoint consists of: stored bytes, chosen rows of them, new rows, a cast of them.

A content is a recipe, not an array: its rows are made when they are asked for, in blocks of `BLOCK_BYTES`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.dtypes import BITS, decode, encode
from bowline.checkpoint.formats.safetensors_writer import Extent
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.errors import FormatError

__all__ = ["Cast", "ChosenRows", "Content", "Held", "NewRows", "Scaled", "Stored"]

BLOCK_BYTES = 512 << 10
THREADS = 2
WORTH_THREADS = 4
"""Blocks from which a tensor is computed by several threads."""
Bits = npt.NDArray[Any]
"""Bit patterns: unsigned integers as wide as the elements."""


class Content(ABC):
    """A tensor's dtype (safetensors' name), its shape, and its rows as bit patterns."""

    dtype: str
    shape: tuple[int, ...]

    @abstractmethod
    def bits(self, start: int, stop: int) -> Bits:
        """Rows `[start, stop)`, along the first axis."""

    @property
    def nbytes(self) -> int:
        """The size in a file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def rows(self) -> int:
        """The length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def values(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows `[start, stop)` as numbers."""
        bits = self.bits(start, stop)
        return decode(np.ascontiguousarray(bits).view(np.uint8).reshape(-1), self.dtype, bits.shape)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The rows in blocks: the first of each, and the one after its last."""
        step = max(1, BLOCK_BYTES * self.rows // max(1, self.nbytes))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def parts(self) -> Iterator[Any]:
        """The bytes in a file, in parts; each is valid until the next is asked for."""
        for start, stop in self.blocks():
            yield self._block(start, stop)

    def sources(self) -> Iterator[Any]:
        """The same for a writer: where bytes are stored as they are, the range of the file that holds them.

        Blocks that have to be computed are computed side by side, a few ahead of the writer.
        """
        blocks = list(self.blocks())
        if len(blocks) < WORTH_THREADS:
            yield from self.parts()
            return
        with ThreadPoolExecutor(THREADS) as computing:
            ahead: deque[Future[Bits]] = deque()
            for block in blocks:
                ahead.append(computing.submit(self._block, *block))
                if len(ahead) > THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _block(self, start: int, stop: int) -> Bits:
        return np.ascontiguousarray(self.bits(start, stop))


class Stored(Content):
    """A tensor as it is stored; with strides (in a pickle) it comes without them."""

    def __init__(self, checkpoint: Checkpoint, tensor: StoredTensor) -> None:
        if tensor.dtype not in BITS:
            raise FormatError(f"{tensor.name}: stored as {tensor.dtype}, which safetensors cannot hold")
        self.checkpoint, self.tensor = checkpoint, tensor
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def bits(self, start: int, stop: int) -> Bits:
        return self.checkpoint.bits(self.tensor.name, start, stop)

    def parts(self) -> Iterator[Any]:
        if self.tensor.strides is not None:
            yield from super().parts()
            return
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes)))
        for at in range(0, self.nbytes, BLOCK_BYTES):
            part = buffer[: min(BLOCK_BYTES, self.nbytes - at)]
            self.checkpoint.read_bytes_into(self.tensor, at, part)
            yield part

    def sources(self) -> Iterator[Any]:
        extent = self.checkpoint.extent(self.tensor) if self.tensor.strides is None else None
        if extent is None:
            yield from self.parts()
        else:
            yield Extent(*extent)


class Held(Content):
    """An array in memory, for what an edit adds and no file holds."""

    def __init__(self, dtype: str, array: npt.NDArray[Any]) -> None:
        self.dtype, self.shape = dtype, array.shape
        self._bits = array.view(f"u{array.itemsize}")

    def bits(self, start: int, stop: int) -> Bits:
        return self._bits[start:stop]


class NewRows(ABC):
    """The rows of new tokens in one tensor, the vocabulary's axis first."""

    @abstractmethod
    def bits(self, at: npt.NDArray[np.int64]) -> Bits:
        """The new rows at these positions, counted from the first new one."""


class ChosenRows(Content):
    """A tensor whose rows along `axis` are the parent's rows at `origins`, or the next of `new` where that is -1."""

    def __init__(self, parent: Content, axis: int, origins: npt.NDArray[np.int64], new: NewRows | None) -> None:
        self.parent, self.axis, self.origins, self.new = parent, axis, origins, new
        self.dtype = parent.dtype
        self.shape = (*parent.shape[:axis], len(origins), *parent.shape[axis + 1 :])
        self._fresh = np.cumsum(origins < 0) - 1  # the number of the new row at a place

    def bits(self, start: int, stop: int) -> Bits:
        if self.axis != 0:
            return self._columns(start, stop)
        origins = self.origins[start:stop]
        stays = origins >= 0
        if stays.all():
            return self._gathered(origins)
        made = self._new(self._fresh[start:stop][~stays])
        if not stays.any():
            return made
        block = np.empty((stop - start, *self.shape[1:]), made.dtype)
        block[~stays] = made
        block[stays] = self._gathered(origins[stays])
        return block

    def _gathered(self, origins: npt.NDArray[np.int64]) -> Bits:
        first, last = int(origins.min()), int(origins.max())
        if last - first + 1 <= 4 * len(origins):  # one read, even if some of its rows are not wanted
            span = self.parent.bits(first, last + 1)
            return span if len(span) == len(origins) and (np.diff(origins) == 1).all() else span[origins - first]
        breaks = np.flatnonzero(np.diff(origins) != 1) + 1
        runs = np.split(origins, breaks)
        return np.concatenate([self.parent.bits(int(run[0]), int(run[-1]) + 1) for run in runs])

    def _columns(self, start: int, stop: int) -> Bits:
        old = np.moveaxis(self.parent.bits(start, stop), self.axis, 0)
        stays = self.origins >= 0
        block = np.empty((len(self.origins), *old.shape[1:]), old.dtype)
        block[stays] = old[self.origins[stays]]
        if not stays.all():
            made = self._new(self._fresh[~stays])  # (new, ...) with the first axis where the vocabulary's was
            block[~stays] = made[:, start:stop]
        return np.moveaxis(block, 0, self.axis)

    def _new(self, at: npt.NDArray[np.int64]) -> Bits:
        assert self.new is not None
        return self.new.bits(at)


class Cast(Content):
    """The same numbers in another float dtype, rounded to nearest, ties to even.

    `overflows` counts finite numbers that became infinite, `subnormals` those that lost digits or vanished because
    they are smaller than the smallest normal number of the dtype; both fill as rows are made, each row once.
    """

    def __init__(self, parent: Content, dtype: str) -> None:
        self.parent, self.dtype, self.shape = parent, dtype, parent.shape
        self._counted: dict[int, tuple[int, int]] = {}

    @property
    def overflows(self) -> int:
        """Finite numbers that became infinite."""
        return sum(overflows for overflows, _ in self._counted.values())

    @property
    def subnormals(self) -> int:
        """Numbers other than zero below the dtype's smallest normal one."""
        return sum(subnormals for _, subnormals in self._counted.values())

    def bits(self, start: int, stop: int) -> Bits:
        values = self.parent.values(start, stop)
        bits = encode(values, self.dtype)
        infinite, normal = PATTERNS[self.dtype]
        size = bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)  # without the sign
        overflows = int((size == infinite).sum())
        if overflows:
            overflows -= int(np.isinf(values).sum())
        small = np.flatnonzero(size <= normal)
        if len(small):
            before = values.reshape(-1)[small]
            after = decode(bits.reshape(-1)[small].view(np.uint8), self.dtype, before.shape)
            small = small[(before != after) & (np.abs(before) < SMALLEST_NORMAL[self.dtype])]
        self._counted[start] = overflows, len(small)
        return bits


SMALLEST_NORMAL: Mapping[str, float] = {"F16": 2.0**-14, "BF16": 2.0**-126, "F32": 2.0**-126, "F64": 2.0**-1022}
PATTERNS: Mapping[str, tuple[int, int]] = {
    "F16": (0x7C00, 0x0400),
    "BF16": (0x7F80, 0x0080),
    "F32": (0x7F800000, 0x00800000),
    "F64": (0x7FF0 << 48, 0x0010 << 48),
}
"""The bits of infinity and of the smallest normal number."""


class Scaled(Content):
    """The numbers times a factor, rounded once."""

    def __init__(self, parent: Content, factor: float) -> None:
        self.parent, self.factor = parent, factor
        self.dtype, self.shape = parent.dtype, parent.shape

    def bits(self, start: int, stop: int) -> Bits:
        return encode(self.parent.values(start, stop).astype(np.float64) * self.factor, self.dtype)
