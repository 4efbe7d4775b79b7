"""One matrix in int8, with a float scale for each row, that both ends of a tie read."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from bowline.nn.modules.int8_product import fast_product
from bowline.nn.tree.save_guard import refuse_to_save, transformers_is_saving
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["QuantizedTable", "codes_of"]

LARGEST = 127
BLOCK_ELEMENTS = 1 << 22
"""Entries per block in which rows are quantised, and converted back to float for the head."""


class QuantizedTable(SharedTable):
    """A `(V, D)` matrix as int8 `values` `(V, D)` and a float `scale` `(V,)`: row v is `scale[v] * values[v]`.

    Symmetric, to the nearest: `scale[v]` is the smallest number of the matrix's dtype that is no less than
    max|row v| / 127 (the one below it where 127 of these would overflow), so that each entry of the product is off by
    at most `scale[v] / 2`. `rows` rounds the product to the dtype: with that, an entry is off by at most
    `(1 + 127 eps) scale[v] / 2`, which in bfloat16, whose eps is 1/128, is nearly twice as much. A cast of the model
    afterwards (`.half()`) rounds the scales: cast first.

    Example:
        >>> table = QuantizedTable(torch.tensor([[127.0, -63.6], [0.0, 0.0]]))
        >>> table.values.tolist(), table.scale.tolist(), table.rows().tolist()
        ([[127, -64], [0, 0]], [1.0, 0.0], [[127.0, -64.0], [0.0, 0.0]])
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        values, scale = codes_of(matrix.detach())
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    @classmethod
    def unfilled(cls, matrix: torch.Tensor) -> QuantizedTable:
        """The table for a matrix of this shape, dtype and device, with zeros for its codes: to be loaded."""
        table = cls(matrix[:0].detach())
        table.values = torch.zeros(matrix.shape, dtype=torch.int8, device=matrix.device)
        table.scale = torch.zeros(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return table

    def rows(self, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The rows `at`, rounded to the scale's dtype: `(..., D)`."""
        return self.values[at].to(self.scale.dtype) * self.scale[at].unsqueeze(-1)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden @ rows.T`: `(..., D)` to `(..., V)`, in blocks of the vocabulary."""
        fast = fast_product(hidden, self.values, self.scale)
        if fast is not None:
            return fast
        return torch.cat([F.linear(hidden, self.rows(block)) for block in _blocks(self.values)], dim=-1)

    def extra_repr(self) -> str:
        rows, width = self.values.shape
        return f"{rows}, {width}, {self.values.dtype}, scale={self.scale.dtype}"

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        if transformers_is_saving():
            refuse_to_save()
        super()._save_to_state_dict(*arguments, **options)


def codes_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 codes `(V, D)` and the scales `(V,)` of a float matrix `(V, D)`."""
    scale = _scale(matrix)
    return _values(matrix, scale), scale


def _blocks(matrix: torch.Tensor) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    return [slice(start, start + step) for start in range(0, max(1, len(matrix)), step)]


def _scale(matrix: torch.Tensor) -> torch.Tensor:
    """max|row| / 127 in the matrix's dtype, rounded up: rounded down, the largest entry would be 128 steps away.

    Except where 127 steps would overflow: there the largest entry is no more than 127.5 of the steps rounded down.
    """
    largest = torch.cat([matrix[block].abs().amax(1) for block in _blocks(matrix)])
    scale = (largest.double() / LARGEST).to(matrix.dtype)
    is_short = scale.double() * LARGEST < largest.double()
    scale = torch.where(is_short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    overflows = torch.isinf(scale * LARGEST) & torch.isfinite(largest)
    return torch.where(overflows, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def _values(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each entry in steps of its row's scale, to the nearest; divided in float64, where a half is not rounded away."""
    steps = scale.double().masked_fill(scale == 0, 1.0).unsqueeze(-1)
    exact = (matrix[block].double() / steps[block] for block in _blocks(matrix))
    return torch.cat([entries.round().clamp(-LARGEST, LARGEST).to(torch.int8) for entries in exact])
