"""One matrix in int8, with a float scale for each row or group of columns, that both ends of a tie read."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from bowline.errors import UsageError
from bowline.nn.modules.int8_product import fast_product
from bowline.nn.tree.save_guard import UnsavedByTransformers
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["QuantizedTable", "blocks_of", "check_groups"]

LARGEST = 127
BLOCK_ELEMENTS = 1 << 22
"""Entries per block in which rows are quantised, and converted back to float for the head."""


class QuantizedTable(UnsavedByTransformers, SharedTable):
    """A `(V, D)` matrix as int8 `values` `(V, D)` and a float `scale` `(V,)`: row v is `scale[v] * values[v]`.

    Symmetric, to the nearest: `scale[v]` is the smallest number of the matrix's dtype that is no less than
    max|row v| / 127 (the one below it where 127 of these would overflow), so that each entry of the product is off by
    at most `scale[v] / 2`. `rows` rounds the product to the dtype: with that, an entry is off by at most
    `(1 + 127 eps) scale[v] / 2`, which in bfloat16, whose eps is 1/128, is nearly twice as much. A cast of the model
    afterwards (`.half()`) rounds the scales: cast first.

    With a `group_size` G, `scale` is `(V, D / G)`, and the same holds for each G columns of a row.

    Example:
        >>> table = QuantizedTable(torch.tensor([[127.0, -63.6], [0.0, 0.0]]))
        >>> table.values.tolist(), table.scale.tolist(), table.rows().tolist()
        ([[127, -64], [0, 0]], [1.0, 0.0], [[127.0, -64.0], [0.0, 0.0]])
    """

    dtype_name = "int8"

    def __init__(self, matrix: torch.Tensor, group_size: int | None = None) -> None:
        super().__init__()
        self.group_size = None if group_size is None else check_groups(group_size, matrix.shape[1])
        for name, part in self.coded(matrix.detach()).items():
            self.register_buffer(name, part)

    @classmethod
    def unfilled(cls, matrix: torch.Tensor, group_size: int | None = None) -> QuantizedTable:
        """The table for a matrix of this shape, dtype and device, with zeros for its codes: to be loaded."""
        table = cls(matrix[:0].detach(), group_size)
        for name in cls.PARTS:
            part = getattr(table, name)
            setattr(table, name, part.new_zeros(len(matrix), *part.shape[1:]))
        return table

    @property
    def shape(self) -> tuple[int, int]:
        """`(V, D)`."""
        rows, width = self.values.shape
        return rows, width

    def coded(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The int8 codes `(V, D)` and the scales of a float matrix `(V, D)`."""
        if self.group_size is None:
            scale = _scale(matrix)
            return {"values": _values(matrix, scale), "scale": scale}
        groups = matrix.reshape(-1, self.group_size)
        scale = _scale(groups)
        by_group = scale.view(len(matrix), matrix.shape[1] // self.group_size)
        return {"values": _values(groups, scale).view(matrix.shape), "scale": by_group}

    def rows(self, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The rows `at`, rounded to the scale's dtype: `(..., D)`."""
        codes, scale = self.values[at].to(self.scale.dtype), self.scale[at]
        if self.group_size is None:
            return codes * scale.unsqueeze(-1)
        return (codes.view(*scale.shape, self.group_size) * scale.unsqueeze(-1)).view(codes.shape)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden @ rows.T`: `(..., D)` to `(..., V)`, in blocks of the vocabulary."""
        fast = fast_product(hidden, self.values, self.scale)
        if fast is not None:
            return fast
        return torch.cat([F.linear(hidden, self.rows(block)) for block in blocks_of(*self.shape)], dim=-1)

    def extra_repr(self) -> str:
        rows, width = self.shape
        groups = "" if self.group_size is None else f", group_size={self.group_size}"
        return f"{rows}, {width}, {self.values.dtype}{groups}, scale={self.scale.dtype}"


def check_groups(size: int, width: int, *, even: bool = False) -> int:
    """The group size. Raises `UsageError` if it does not divide the width, or is odd where two codes share a byte."""
    if width % size or (even and size % 2):
        raise UsageError(
            f"group_size={size}: expected {'an even' if even else 'a'} divisor of the width, {width}",
            help="32, 64 or 128 divide most models' widths",
            argument="group_size",
        )
    return size


def blocks_of(rows: int, width: int) -> list[slice]:
    """The rows in blocks of about `BLOCK_ELEMENTS` entries; one empty block for no rows."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def _scale(matrix: torch.Tensor) -> torch.Tensor:
    """max|row| / 127 in the matrix's dtype, rounded up: rounded down, the largest entry would be 128 steps away.

    Except where 127 steps would overflow: there the largest entry is no more than 127.5 of the steps rounded down.
    """
    largest = torch.cat([matrix[block].abs().amax(1) for block in blocks_of(*matrix.shape)])
    scale = (largest.double() / LARGEST).to(matrix.dtype)
    is_short = scale.double() * LARGEST < largest.double()
    scale = torch.where(is_short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    overflows = torch.isinf(scale * LARGEST) & torch.isfinite(largest)
    return torch.where(overflows, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def _values(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each entry in steps of its row's scale, to the nearest; divided in float64, where a half is not rounded away."""
    steps = scale.double().masked_fill(scale == 0, 1.0).unsqueeze(-1)
    exact = (matrix[block].double() / steps[block] for block in blocks_of(*matrix.shape))
    return torch.cat([entries.round().clamp(-LARGEST, LARGEST).to(torch.int8) for entries in exact])
