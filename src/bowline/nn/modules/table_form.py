"""The forms of a quantised table: its codes' width, and the columns that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bowline.errors import UsageError
from bowline.nn.modules.int4_table import Int4Table
from bowline.nn.modules.quantized_table import QuantizedTable
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["TableForm"]

INT4_GROUP = 32
"""The default number of columns that share a scale and a zero in 4 bits."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """`dtype` is `"int8"` or `"int4"`; `group_size` the columns that share a scale, or `None` for whole rows (int8)."""

    dtype: str
    group_size: int | None

    @classmethod
    def asked(cls, dtype: str | torch.dtype, group_size: int | None) -> TableForm:
        """The form that the arguments of `quantize_tied` name.

        Raises:
            UsageError: another dtype than int8 or int4, or a group of no columns.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in ("int8", "int4"):
            raise UsageError(f"dtype={dtype}: expected 'int8' or 'int4'", argument="dtype")
        if group_size is not None and (type(group_size) is not int or group_size < 1):
            raise UsageError(f"group_size={group_size!r}: expected a number of columns", argument="group_size")
        return cls(name, INT4_GROUP if group_size is None and name == "int4" else group_size)

    @classmethod
    def stored(cls, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> TableForm | None:
        """The form of stored parts, or `None` if they are no table of `quantize_tied`."""
        if values.ndim != 2 or len(values) != len(scale):
            return None
        if values.dtype is torch.int8 and zero is None:
            whole = scale.ndim == 1 or scale.shape[1] == 0
            return cls("int8", None if whole else values.shape[1] // scale.shape[1])
        if values.dtype is torch.uint8 and zero is not None and scale.ndim == 2 and scale.shape[1] > 0:
            return cls("int4", 2 * values.shape[1] // scale.shape[1])
        return None

    def width(self, values: torch.Tensor) -> int:
        """The columns of the matrix whose codes these are."""
        return int(values.shape[1]) * (2 if self.dtype == "int4" else 1)

    def table(self, matrix: torch.Tensor, *, filled: bool = True) -> SharedTable:
        """The table of a matrix; unless `filled`, with zeros for its codes, which are to be loaded.

        Raises:
            UsageError: the group size does not divide the width, or is odd for int4.
        """
        if self.dtype == "int8":
            return (QuantizedTable if filled else QuantizedTable.unfilled)(matrix, self.group_size)
        assert self.group_size is not None
        return (Int4Table if filled else Int4Table.unfilled)(matrix, self.group_size)
