"""How a table that `quantize_tied` made is stored, and how a float model is made to match it before a load.

The tensors are `<embedding>.table.values` and `.scale`, and `.zero` for int4. `config.json` names the tables in
`quantization_config`. That entry has no `quant_method`, so transformers' `from_pretrained` refuses the checkpoint; by
any method that it does not know it would skip the table and initialise both ends at random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from bowline.errors import CheckpointError, TieError
from bowline.nn.modules.quantize_tied import share_tables
from bowline.nn.modules.table_form import TableForm
from bowline.nn.state.tensor_names import to_live
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.tree.slots import named_modules, slots
from bowline.nn.tree.table_slots import SharedTable
from bowline.tie import Tie

__all__ = ["TABLE_PARTS", "match_tables", "repeated_names", "table_names", "with_tables"]

VALUES, SCALE, ZERO = ".table.values", ".table.scale", ".table.zero"
TABLE_PARTS = (".values", ".scale", ".zero")
"""How the names of a table's tensors end in a model's state, whatever the table's own name."""
ENTRY = "quantization_config"
MAKER = {"quantized_by": "bowline.quantize_tied"}


def table_names(model: nn.Module) -> dict[str, SharedTable]:
    """The model's tables by the names of their codes in its state, each table once."""
    return {f"{names[0]}.values": table for table, names in _tables(model)}


def repeated_names(model: nn.Module) -> dict[str, str]:
    """The names in the state that repeat a table's tensors, where several embeddings have it, each with its first."""
    return {
        f"{name}.{part}": f"{first}.{part}"
        for table, (first, *others) in _tables(model)
        for name in others
        for part in table.PARTS
    }


def _tables(model: nn.Module) -> list[tuple[SharedTable, list[str]]]:
    """Each table of the model with its names."""
    grouped: dict[int, tuple[SharedTable, list[str]]] = {}
    for name, module in named_modules(model):
        if isinstance(module, SharedTable):
            grouped.setdefault(id(module), (module, []))[1].append(name)
    return list(grouped.values())


def with_tables(config: str, tables: Mapping[str, SharedTable]) -> str:
    """The text of a `config.json` with an entry for the tables, by the names of their codes on disk; without any, none.

    The entry's `dtype` and `group_size` are the first table's; the files say the same of each.
    """
    content: dict[str, Any] = json.loads(config)
    names = [name.removesuffix(".values") for name in tables]
    if names:
        first = next(iter(tables.values()))
        form = {"dtype": first.dtype_name, "group_size": first.group_size}
        content[ENTRY] = MAKER | {key: value for key, value in form.items() if value is not None} | {"tables": names}
    elif _is_ours(content.get(ENTRY)):
        del content[ENTRY]
    else:
        return config
    return json.dumps(content, indent=2) + "\n"


def match_tables(model: nn.Module, stored: dict[str, torch.Tensor], undo: ExitStack) -> tuple[Tie, ...]:
    """Put an empty table in `model` wherever `stored` has one and the model a float matrix; returns their ties.

    Scales of whole rows that have two axes, as torchao stores them, lose the second in `stored`.

    Raises:
        TieError: the model's matrix in that place is not tied, or a module does more than look up or multiply.
    """
    for name, scale in stored.items():
        if name.endswith(SCALE) and scale.ndim == 2 and scale.shape[1] == 1:
            codes = stored.get(name.removesuffix(SCALE) + VALUES)
            if codes is not None and codes.dtype is torch.int8:
                stored[name] = scale.view(-1)
    forms = _forms(stored)
    if not forms:
        return ()
    known = slots(model)
    live: dict[str, str] = {}
    for stem, form in forms.items():
        values = stored[stem + VALUES]
        whole = torch.empty(len(values), form.width(values), device="meta")
        known_tensors = {name: slot.tensor for name, slot in known.items()}
        live |= dict.fromkeys(to_live(model, known_tensors, {f"{stem}.weight": whole}), stem)
    ties: list[Tie] = []
    seen: set[int] = set()
    for source in (name for name in known if name in live):
        if id(known[source].tensor) in seen:  # a file may hold one table under the name of each embedding
            continue
        seen.add(id(known[source].tensor))
        stem, form, width = live[source], forms[live[source]], known[source].tensor.shape[-1]
        if form.width(stored[stem + VALUES]) != width:
            raise CheckpointError(
                f"{stem}{VALUES} has codes for {form.width(stored[stem + VALUES])} columns, but {source} has {width}",
                help="build the model with the checkpoint's config",
            )
        holders = [name for name, slot in known.items() if slot.tensor is known[source].tensor and name != source]
        if not holders:
            raise TieError(
                f"{source}: the checkpoint has one {form.dtype} table for an embedding and its head, but in the model "
                f"no other module holds this matrix{_declared(model, source)}",
                help="tie_weights(model, on_conflict='source') first",
            )
        ties += [Tie(name, source) for name in holders]
    if ties:
        share_tables(model, tuple(ties), {tie.source: forms[live[tie.source]] for tie in ties}, undo, filled=False)
    return tuple(ties)


def _forms(stored: Mapping[str, torch.Tensor]) -> dict[str, TableForm]:
    """The form of each stored table, by the name of its module."""
    found = {}
    for name in stored:
        stem = name.removesuffix(VALUES)
        if stem != name and stem + SCALE in stored:
            form = TableForm.stored(stored[name], stored[stem + SCALE], stored.get(stem + ZERO))
            if form is not None:
                found[stem] = form
    return found


def _declared(model: nn.Module, source: str) -> str:
    names = [tie.target for tie in declared_ties(model, flag=True) if tie.source == source]
    return f" ({', '.join(names)} could)" if names else ""


def _is_ours(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("quantized_by") == MAKER["quantized_by"]
