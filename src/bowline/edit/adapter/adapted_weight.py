"""Tensors as an adapter leaves them, made in blocks: a low-rank delta added, rows written, or a trained copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import encode
from bowline.checkpoint.formats.peft_adapter import AdapterTensor
from bowline.edit.adapter.adapter_file import AdapterFile
from bowline.edit.content import Bits, Content

__all__ = ["Added", "FromAdapter", "LowRank", "Normalised", "WrittenRows"]

Values = npt.NDArray[Any]
Factors = Callable[[], tuple[Values, Values]]
"""Gives the two matrices (rows, r) and (r, columns) whose product is a delta."""


class LowRank(Content):
    """W + s · left @ right, summed in float32 (or wider, as the tensor is) and rounded once to the stored dtype."""

    def __init__(self, parent: Content, factors: Factors, scaling: float) -> None:
        self.parent, self.factors, self.scaling = parent, factors, scaling
        self.dtype, self.shape = parent.dtype, parent.shape

    def sums(self, start: int, stop: int) -> Values:
        """Rows `[start, stop)` before they are rounded, as a matrix."""
        values = self.parent.values(start, stop).reshape(stop - start, -1)
        left, right = self.factors()
        sums: Values = np.matmul(left[start:stop], right)
        if values.dtype == np.float64:
            sums = sums.astype(np.float64)
        sums *= self.scaling
        sums += values
        return sums

    def bits(self, start: int, stop: int) -> Bits:
        return encode(self.sums(start, stop).reshape(stop - start, *self.shape[1:]), self.dtype)


class Normalised(Content):
    """DoRA: m · V / ‖V‖ for V = W + s · B A, the norm over each output's weights.

    `axis` is the axis of V that counts the outputs: 0 for a linear layer, 1 for an embedding or a transposed layer.
    """

    def __init__(self, parent: LowRank, magnitude: Callable[[], Values], axis: int) -> None:
        self.parent, self.magnitude, self.axis = parent, magnitude, axis
        self.dtype, self.shape = parent.dtype, parent.shape
        self._column_factors: Values | None = None

    def bits(self, start: int, stop: int) -> Bits:
        sums = self.parent.sums(start, stop)
        if self.axis == 0:
            norms = np.sqrt(np.square(sums, dtype=np.float64).sum(1))
            sums *= (self.magnitude().reshape(-1)[start:stop] / norms).astype(sums.dtype)[:, None]
        else:
            sums *= self._of_columns().astype(sums.dtype)
        return encode(sums.reshape(stop - start, *self.shape[1:]), self.dtype)

    def _of_columns(self) -> Values:
        if self._column_factors is None:
            squares: Any = 0.0
            for block in self.blocks():
                squares = squares + np.square(self.parent.sums(*block), dtype=np.float64).sum(0)
            self._column_factors = self.magnitude().reshape(-1) / np.sqrt(squares)
        return self._column_factors


class Added(Content):
    """A vector plus another times a factor: a bias with the bias of a LoRA."""

    def __init__(self, parent: Content, addend: Callable[[], Values], scaling: float) -> None:
        self.parent, self.addend, self.scaling = parent, addend, scaling
        self.dtype, self.shape = parent.dtype, parent.shape

    def bits(self, start: int, stop: int) -> Bits:
        values = _wide(self.parent.values(start, stop))
        return encode(values + self.scaling * self.addend()[start:stop], self.dtype)


class WrittenRows(Content):
    """A table in which the rows `ids` hold other values."""

    def __init__(self, parent: Content, ids: tuple[int, ...], rows: Callable[[], Values]) -> None:
        self.parent, self.rows_of = parent, rows
        self.dtype, self.shape = parent.dtype, parent.shape
        self.ids = np.array(ids, np.int64)

    def bits(self, start: int, stop: int) -> Bits:
        bits = self.parent.bits(start, stop)
        inside = np.flatnonzero((self.ids >= start) & (self.ids < stop))
        if len(inside):
            bits = bits.copy()
            bits[self.ids[inside] - start] = encode(self.rows_of()[inside], self.dtype)
        return bits


class FromAdapter(Content):
    """A tensor as the adapter's file holds it."""

    def __init__(self, file: AdapterFile, tensor: AdapterTensor) -> None:
        self.file, self.tensor = file, tensor
        self.dtype, self.shape = tensor.stored.dtype, tensor.stored.shape

    def bits(self, start: int, stop: int) -> Bits:
        return self.file.bits(self.tensor, start, stop)


def _wide(values: Values) -> Values:
    """A copy, in float32 at least."""
    return values.astype(np.promote_types(values.dtype, np.float32))
