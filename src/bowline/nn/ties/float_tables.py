"""Converts quantised tables back to float parameters, so that their ends are tied as they were before."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn

from bowline.nn.tree.save_guard import guard_saves
from bowline.nn.tree.slots import named_modules
from bowline.nn.tree.table_slots import SharedTable, table_slots
from bowline.tie import Tie

__all__ = ["tables_to_float"]


def tables_to_float(model: nn.Module, ties: Iterable[Tie], undo: ExitStack) -> None:
    """Put one float `Parameter` in place of each table that an end of `ties` reads, at every end of that table.

    The modules that were there before come back. The model computes what it did, up to the order of sums.
    """
    found = table_slots(model)
    wanted = {id(found[name].end.table) for tie in ties for name in (tie.source, tie.target) if name in found}
    fresh: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    for slot in found.values():
        key = id(slot.end.table)
        if key in wanted:
            if key not in parameters:
                parameters[key] = nn.Parameter(slot.end.weight.detach().clone(), requires_grad=slot.end.took_gradient)
            if id(slot.end) not in fresh:
                fresh[id(slot.end)] = slot.end.in_float(parameters[key])
    if not fresh:
        return
    undo.callback(guard_saves, model, SharedTable)
    for _, parent in dict(named_modules(model)).items():
        for child, module in parent._modules.items():
            if module is not None and id(module) in fresh:
                undo.callback(parent._modules.__setitem__, child, module)
                parent._modules[child] = fresh[id(module)]
    guard_saves(model, SharedTable)
