"""The parts of a quantised table as contents: codes, scales and zeros, made of float rows a block at a time.

They have the bits that `bowline.nn`'s `QuantizedTable` and `Int4Table` give for the same matrix: the same steps, in the
same order and precision. Each part computes its block on its own, so that no part is held for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import decode, encode
from bowline.edit.content import Bits, Content

__all__ = ["Int4Part", "Int8Part", "is_finite"]

Floats = npt.NDArray[Any]

INT8_LARGEST = 127
INT4_LARGEST = 15
PARTS_OF_STEP = 16
LARGEST_ZERO = 255
LARGEST: Mapping[str, float] = {
    "F16": 65504.0,
    "BF16": (2 - 2.0**-7) * 2.0**127,
    "F32": (2 - 2.0**-23) * 2.0**127,
    "F64": (2 - 2.0**-52) * 2.0**1023,
}
"""The largest finite number of each dtype."""


class _Part(Content):
    """One tensor of the table of `parent`, whose rows have groups of `size` columns."""

    def __init__(self, parent: Content, size: int, part: str) -> None:
        self.parent, self.size, self.part = parent, size, part

    def _groups(self, start: int, stop: int) -> Floats:
        """Rows as `(rows, groups, columns)`, in float32 unless they are float64."""
        values = self.parent.values(start, stop)
        wide = values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
        return wide.reshape(stop - start, -1, self.size)


class Int8Part(_Part):
    """`values` `(rows, columns)` I8, or `scale` `(rows, groups)` in the matrix's dtype, of an int8 table.

    With `flat`, the scales of whole rows are `(rows,)`, as `quantize_tied` has them.
    """

    def __init__(self, parent: Content, size: int, part: str, *, flat: bool = False) -> None:
        super().__init__(parent, size, part)
        rows, columns = parent.shape
        is_codes = part == "values"
        self.dtype = "I8" if is_codes else parent.dtype
        self.shape = (rows, columns) if is_codes else (rows,) if flat else (rows, columns // size)

    def bits(self, start: int, stop: int) -> Bits:
        groups = self._groups(start, stop)
        bits = self._scale(np.abs(groups).max(-1))
        if self.part == "scale":
            return bits.reshape(stop - start, *self.shape[1:])
        steps = _numbers(bits, self.parent.dtype).astype(np.float64)
        steps[steps == 0] = 1.0
        codes = np.rint(groups.astype(np.float64) / steps[..., None]).clip(-INT8_LARGEST, INT8_LARGEST)
        return codes.astype(np.int8).reshape(stop - start, -1).view(np.uint8)

    def _scale(self, largest: Floats) -> Bits:
        """max|group| / 127 in the dtype, rounded up; down where 127 of these would overflow."""
        dtype = self.parent.dtype
        bits = encode(largest.astype(np.float64) / INT8_LARGEST, dtype)
        one = bits.dtype.type(1)
        with np.errstate(over="ignore"):
            short = _numbers(bits, dtype).astype(np.float64) * INT8_LARGEST < largest
        bits = np.where(short, bits + one, bits)
        scale = _numbers(bits, dtype)
        with np.errstate(over="ignore"):
            product = scale * scale.dtype.type(INT8_LARGEST)
            overflows = np.isinf(_numbers(encode(product, dtype), dtype))
        scales: Bits = np.where(overflows, bits - one, bits)
        return scales


class Int4Part(_Part):
    """`values` `(rows, columns / 2)`, `scale` or `zero` `(rows, groups)` of an int4 table; see `Int4Table`."""

    def __init__(self, parent: Content, size: int, part: str) -> None:
        super().__init__(parent, size, part)
        rows, columns = parent.shape
        self.dtype = parent.dtype if part == "scale" else "U8"
        self.shape = (rows, columns // 2) if part == "values" else (rows, columns // size)

    def bits(self, start: int, stop: int) -> Bits:
        groups, dtype = self._groups(start, stop), self.parent.dtype
        kind = groups.dtype.type
        low, high = np.minimum(groups.min(-1), kind(0)), np.maximum(groups.max(-1), kind(0))
        bits = encode(high / kind(INT4_LARGEST) - low / kind(INT4_LARGEST), dtype)
        near_overflow = np.maximum(high, -low) > LARGEST[dtype] / 2
        bits = np.where(near_overflow, bits - bits.dtype.type(1), bits)
        if self.part == "scale":
            return bits
        step = _numbers(bits, dtype).astype(kind, copy=True)
        step[step == 0] = 1
        zero = np.rint(-low / step * kind(PARTS_OF_STEP)).clip(0, LARGEST_ZERO)
        if self.part == "zero":
            octets: Bits = zero.astype(np.uint8)
            return octets
        codes = np.rint(groups / step[..., None] + (zero / kind(PARTS_OF_STEP))[..., None]).clip(0, INT4_LARGEST)
        first, second = np.split(codes.astype(np.uint8), 2, axis=-1)
        packed: Bits = (first | (second << np.uint8(4))).reshape(stop - start, -1)
        return packed


def is_finite(content: Content) -> bool:
    """Whether every number is finite; read a block at a time."""
    return all(bool(np.isfinite(content.values(*block)).all()) for block in content.blocks())


def _numbers(bits: Bits, dtype: str) -> Floats:
    numbers: Floats = decode(np.ascontiguousarray(bits).view(np.uint8).reshape(-1), dtype, bits.shape)
    return numbers
