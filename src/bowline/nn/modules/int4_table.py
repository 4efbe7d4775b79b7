"""One matrix in 4 bits, with a scale and a zero for each group of columns, that both ends of a tie read."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional as F  # noqa: N812

from bowline.nn.modules.int4_product import fast_int4_product
from bowline.nn.modules.quantized_table import blocks_of, check_groups
from bowline.nn.tree.save_guard import UnsavedByTransformers
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["Int4Table"]

LARGEST = 15
PARTS_OF_STEP = 16
LARGEST_ZERO = 255


class Int4Table(UnsavedByTransformers, SharedTable):
    """A `(V, D)` matrix as codes of 0 to 15 in groups of G columns: entry (v, j), with g = j // G, is

    `scale[v, g] * (code[v, j] - zero[v, g] / 16)`.

    `values` `(V, D / 2)` uint8 holds two codes a byte: byte i of a group is its code i, plus 16 times its code
    i + G / 2. `scale` `(V, D / G)` has the matrix's dtype, `zero` `(V, D / G)` is uint8. With G = 32 a bfloat16 matrix
    takes 0.297 of its bytes.

    Asymmetric: with lo = min(0, least entry) and hi = max(0, largest entry) of a group, `scale` is (hi - lo) / 15,
    rounded to the dtype, and `zero` is -16 lo / scale, rounded. An entry is off by at most
    `(1/2 + 1/32 + 15 eps) scale`, and `rows` rounds once more, to the dtype. Symmetric codes (`scale * code`, -7 to 7)
    take 0.281 of the bytes, and their root mean square error is larger: 12.6% of the matrix's in SmolLM2-135M's
    embedding with groups of 32, where this one's is 9.0% (9.7% and 7.8% of a Gaussian matrix). With whole zeros
    (0 to 15) it is 9.3%.

    Example:
        >>> table = Int4Table(torch.tensor([[-1.0, 0.0, 2.0, 14.0]]), group_size=4)
        >>> table.values.tolist(), table.scale.tolist(), table.zero.tolist(), table.rows().tolist()
        ([[48, 241]], [[1.0]], [[16]], [[-1.0, 0.0, 2.0, 14.0]])
    """

    dtype_name = "int4"
    PARTS: ClassVar[tuple[str, ...]] = ("values", "scale", "zero")
    zero: torch.Tensor
    group_size: int

    def __init__(self, matrix: torch.Tensor, group_size: int) -> None:
        super().__init__()
        self.group_size = check_groups(group_size, matrix.shape[1], even=True)
        for name, part in self.coded(matrix.detach()).items():
            self.register_buffer(name, part)

    @classmethod
    def unfilled(cls, matrix: torch.Tensor, group_size: int) -> Int4Table:
        """The table for a matrix of this shape, dtype and device, with zeros for its codes: to be loaded."""
        table = cls(matrix[:0].detach(), group_size)
        for name in cls.PARTS:
            part = getattr(table, name)
            setattr(table, name, part.new_zeros(len(matrix), part.shape[1]))
        return table

    @property
    def shape(self) -> tuple[int, int]:
        """`(V, D)`."""
        return len(self.values), 2 * self.values.shape[1]

    def coded(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of the table for these float rows."""
        made = [self._coded(matrix[block]) for block in blocks_of(*matrix.shape)]
        return {name: torch.cat([part[name] for part in made]) for name in self.PARTS}

    def _coded(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same steps in the same order as `bowline.edit.quantised_rows`, which gives the same bits."""
        dtype = rows.dtype
        groups = rows.reshape(len(rows), rows.shape[1] // self.group_size, self.group_size)
        groups = groups if dtype is torch.float64 else groups.float()
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high / LARGEST - low / LARGEST).to(dtype)
        near_overflow = (torch.maximum(high, -low) > torch.finfo(dtype).max / 2) & torch.isfinite(scale)
        scale = torch.where(near_overflow, torch.nextafter(scale, torch.zeros_like(scale)), scale)
        step = scale.to(groups.dtype)
        step = step.masked_fill(step == 0, 1.0)
        zero = (-low / step * PARTS_OF_STEP).round().clamp(0, LARGEST_ZERO)
        codes = (groups / step.unsqueeze(-1) + (zero / PARTS_OF_STEP).unsqueeze(-1)).round().clamp(0, LARGEST)
        first, second = codes.to(torch.uint8).chunk(2, dim=-1)
        packed = (first | (second << 4)).reshape(len(rows), rows.shape[1] // 2)
        return {"values": packed, "scale": scale, "zero": zero.to(torch.uint8)}

    def rows(self, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The rows `at`, rounded to the scale's dtype: `(..., D)`."""
        values, scale, zero = self.values[at], self.scale[at], self.zero[at]
        packed = values.reshape(*zero.shape, self.group_size // 2)
        codes = torch.cat([packed & LARGEST, packed >> 4], dim=-1).to(scale.dtype)
        shifted = codes - zero.unsqueeze(-1).to(scale.dtype) / PARTS_OF_STEP  # exact: 8 bits
        return (shifted * scale.unsqueeze(-1)).reshape(*values.shape[:-1], 2 * values.shape[-1])

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden @ rows.T`: `(..., D)` to `(..., V)`, in blocks of the vocabulary."""
        fast = fast_int4_product(hidden, self.values, self.scale, self.zero)
        if fast is not None:
            return fast
        return torch.cat([F.linear(hidden, self.rows(block)) for block in blocks_of(*self.shape)], dim=-1)

    def extra_repr(self) -> str:
        rows, width = self.shape
        return f"{rows}, {width}, int4, group_size={self.group_size}, scale={self.scale.dtype}"
