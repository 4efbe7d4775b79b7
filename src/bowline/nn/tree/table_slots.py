"""Places whose matrix is computed from a table that several modules share, as `quantize_tied` leaves them.

No parameter is there, so `slots` lists only the table's own tensors. `tie_ends` lists the places that the ties name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NoReturn

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.tree.slots import Slot, named_modules, slots

__all__ = ["SharedTable", "TableEnd", "TableSlot", "is_head", "is_lookup", "table_slots", "tie_ends"]


class SharedTable(nn.Module):
    """A `(V, D)` matrix held as codes: `values`, `scale` and what else `PARTS` names, the rows first in each."""

    PARTS: ClassVar[tuple[str, ...]] = ("values", "scale")
    """The names of its tensors, the codes first."""
    dtype_name: ClassVar[str]
    """The codes' dtype in words: `"int8"` or `"int4"`."""
    values: torch.Tensor
    scale: torch.Tensor
    group_size: int | None
    """The columns that share a scale; `None` for whole rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(V, D)`."""
        raise NotImplementedError

    def coded(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a table of this form for these float rows."""
        raise NotImplementedError

    def rows(self, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The rows `at` of the matrix that the codes stand for: `(..., D)`."""
        raise NotImplementedError

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden @ rows.T`: `(..., D)` to `(..., V)`."""
        raise NotImplementedError


class TableEnd(nn.Module):
    """A module whose `weight` is a table's matrix. Ends with one table are tied."""

    looks_up: ClassVar[bool]
    """Whether the module looks rows up; otherwise it multiplies by the matrix."""

    @property
    def table(self) -> SharedTable:
        """The table."""
        raise NotImplementedError

    def read(self, table: SharedTable) -> None:
        """Use `table` from now on."""
        raise NotImplementedError

    @property
    def weight(self) -> torch.Tensor:
        """The matrix that it computes with, `(V, D)`, made anew at each access."""
        return self.table.rows()

    @property
    def took_gradient(self) -> bool:
        """Whether the matrix took a gradient before it was quantised."""
        raise NotImplementedError

    def in_float(self, parameter: nn.Parameter) -> nn.Module:
        """The module that was here before the table, with `parameter` as its weight."""
        raise NotImplementedError


class TableSlot(Slot):
    """The place of a matrix that is computed from a table; `tensor` is the table's codes, whose identity it shares."""

    @property
    def end(self) -> TableEnd:
        """The module."""
        assert isinstance(self.module, TableEnd)
        return self.module

    @property
    def tensor(self) -> torch.Tensor:
        """The table's codes."""
        return self.end.table.values

    @property
    def is_parameter(self) -> bool:
        """Never: the matrix is computed."""
        return False

    def put(self, parameter: nn.Parameter) -> NoReturn:
        """Raise a `TieError`: a parameter cannot take the place of a table."""
        raise TieError(
            f"{self.name}: is computed from a quantised table, expected a parameter",
            help="untie_weights(model) converts the table back to float matrices",
        )


def table_slots(model: nn.Module) -> dict[str, TableSlot]:
    """The places in `model` whose matrix is computed from a table, by name: `<module>.weight`."""
    ends = [(name, module) for name, module in named_modules(model) if isinstance(module, TableEnd)]
    named = [(f"{name}.weight" if name else "weight", module) for name, module in ends]
    return {name: TableSlot(name, module, "weight") for name, module in named}


def tie_ends(model: nn.Module, known: Mapping[str, Slot] | None = None) -> dict[str, Slot]:
    """`slots(model)`, with the places that read a table instead of the table's own tensors.

    `known` are `slots(model)`, where the caller has them already.
    """
    known = slots(model) if known is None else known
    ends = table_slots(model)
    if not ends:
        return dict(known)
    return {name: slot for name, slot in known.items() if not isinstance(slot.module, SharedTable)} | ends


def is_lookup(module: nn.Module) -> bool:
    """Whether a module looks its rows up: an `nn.Embedding`, or the quantised end that replaced one."""
    return module.looks_up if isinstance(module, TableEnd) else isinstance(module, nn.Embedding)


def is_head(module: nn.Module) -> bool:
    """Whether a module multiplies by its matrix: an `nn.Linear`, or the quantised end that replaced one."""
    return not module.looks_up if isinstance(module, TableEnd) else isinstance(module, nn.Linear)
