"""A tensor of a GGUF file as it is stored, or some of its rows, read in blocks whatever its type."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf.ggml_types import BLOCKS
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.edit.content import BLOCK_BYTES
from bowline.errors import TieError

__all__ = ["StoredRows"]

Ids = npt.NDArray[np.int64]
DENSE = 4
"""Rows are read together with those between them if these are fewer than so many times the rows."""


class StoredRows:
    """The rows of a stored tensor at `origins`, in that order; without `origins` the whole tensor."""

    def __init__(self, checkpoint: Checkpoint, tensor: StoredTensor, origins: Ids | None = None) -> None:
        self.checkpoint, self.tensor, self.origins = checkpoint, tensor, origins
        self.dtype = tensor.dtype
        self.shape = tensor.shape if origins is None else (len(origins), *tensor.shape[1:])

    @property
    def rows(self) -> int:
        """The number of rows; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, which has one token's numbers."""
        return self.tensor.nbytes // max(1, self.tensor.shape[0] if self.tensor.shape else 1)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self.tensor.nbytes if self.origins is None else len(self.origins) * self.row_bytes

    def kept(self, origins: Ids) -> StoredRows:
        """These rows of the rows.

        Raises:
            TieError: a row does not begin with a byte of its own, since a block spans several.
        """
        if self.dtype in BLOCKS and len(self.shape) == 1:
            raise TieError(
                f"{self.tensor.name}: a vector of {self.dtype}, whose blocks hold several tokens each",
                help="convert the model again with this tensor in F32",
            )
        chosen = origins if self.origins is None else self.origins[origins]
        return StoredRows(self.checkpoint, self.tensor, chosen)

    def blocks(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The rows in blocks of about 512 KB, `(rows, bytes of a row)`; each is valid until the next is asked for."""
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            if self.origins is None:
                yield self._read(start, stop)
            else:
                yield self._gathered(self.origins[start:stop])

    def parts(self) -> Iterator[memoryview]:
        """The bytes in a file, in parts."""
        if self.origins is not None:
            yield from (block.data.cast("B") for block in self.blocks() if block.nbytes)
            return
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes)))
        for at in range(0, self.nbytes, BLOCK_BYTES):
            part = buffer[: min(BLOCK_BYTES, self.nbytes - at)]
            self.checkpoint.read_bytes_into(self.tensor, at, part)
            yield part

    def _read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        block = np.empty((stop - start, self.row_bytes), np.uint8)
        if block.nbytes:
            self.checkpoint.read_bytes_into(self.tensor, start * self.row_bytes, block.data.cast("B"))
        return block

    def _gathered(self, origins: Ids) -> npt.NDArray[np.uint8]:
        first, last = int(origins.min()), int(origins.max())
        if last - first < DENSE * len(origins):
            span = self._read(first, last + 1)
            return span if len(span) == len(origins) and (np.diff(origins) == 1).all() else span[origins - first]
        runs = np.split(origins, np.flatnonzero(np.diff(origins) != 1) + 1)
        return np.concatenate([self._read(int(run[0]), int(run[-1]) + 1) for run in runs])
