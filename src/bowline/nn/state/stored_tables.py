"""How a table that `quantize_tied` made is stored, and how a float model is made to match it before a load.

The tensors are `<embedding>.table.values` and `<embedding>.table.scale`. `config.json` names them in
`quantization_config`. That entry has no `quant_method`, so transformers' `from_pretrained` refuses the checkpoint; by
any method that it does not know it would skip the table and initialise both ends at random.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.modules.quantize_tied import share_tables
from bowline.nn.modules.quantized_table import QuantizedTable
from bowline.nn.state.tensor_names import to_live
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.tree.slots import named_modules, slots
from bowline.tie import Tie

__all__ = ["TABLE_PARTS", "match_tables", "repeated_names", "table_names", "with_tables"]

VALUES, SCALE = ".table.values", ".table.scale"
TABLE_PARTS = (".values", ".scale")
"""How the names of a table's tensors end in a model's state, whatever the table's own name."""
ENTRY = "quantization_config"
MAKER = {"quantized_by": "bowline.quantize_tied", "dtype": "int8"}


def table_names(model: nn.Module) -> list[str]:
    """The names of the tables' codes in the model's state, each table once."""
    return [f"{names[0]}.values" for names in _tables(model)]


def repeated_names(model: nn.Module) -> dict[str, str]:
    """The names in the state that repeat a table's tensors, where several embeddings have it, each with its first."""
    return {
        f"{name}.{part}": f"{first}.{part}"
        for first, *others in _tables(model)
        for name in others
        for part in ("values", "scale")
    }


def _tables(model: nn.Module) -> list[list[str]]:
    """The names of each table of the model."""
    grouped: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        if isinstance(module, QuantizedTable):
            grouped.setdefault(id(module), []).append(name)
    return list(grouped.values())


def with_tables(config: str, tables: Iterable[str]) -> str:
    """The text of a `config.json` with an entry that names the tables on disk, or without it if there are none."""
    content: dict[str, Any] = json.loads(config)
    names = [name.removesuffix(".values") for name in tables]
    if names:
        content[ENTRY] = MAKER | {"tables": names}
    elif _is_ours(content.get(ENTRY)):
        del content[ENTRY]
    else:
        return config
    return json.dumps(content, indent=2) + "\n"


def match_tables(model: nn.Module, stored: Mapping[str, torch.Tensor], undo: ExitStack) -> tuple[Tie, ...]:
    """Put an empty table in `model` wherever `stored` has one and the model a float matrix; returns their ties.

    Raises:
        TieError: the model's matrix in that place is not tied, or a module does more than look up or multiply.
    """
    stems = [name.removesuffix(VALUES) for name in stored if name.endswith(VALUES)]
    stems = [stem for stem in stems if stem + SCALE in stored and stored[stem + VALUES].dtype is torch.int8]
    if not stems:
        return ()
    known = slots(model)
    live = {
        name
        for stem in stems
        for name in to_live(
            model,
            {name: slot.tensor for name, slot in known.items()},
            {f"{stem}.weight": torch.empty(stored[stem + VALUES].shape, device="meta")},
        )
    }
    ties: list[Tie] = []
    seen: set[int] = set()
    for source in (name for name in known if name in live):
        if id(known[source].tensor) in seen:  # a file may hold one table under the name of each embedding
            continue
        seen.add(id(known[source].tensor))
        holders = [name for name, slot in known.items() if slot.tensor is known[source].tensor and name != source]
        if not holders:
            raise TieError(
                f"{source}: the checkpoint has one int8 table for an embedding and its head, but in the model no other "
                f"module holds this matrix{_declared(model, source)}",
                help="tie_weights(model, on_conflict='source') first",
            )
        ties += [Tie(name, source) for name in holders]
    if ties:
        share_tables(model, tuple(ties), undo, filled=False)
    return tuple(ties)


def _declared(model: nn.Module, source: str) -> str:
    names = [tie.target for tie in declared_ties(model, flag=True) if tie.source == source]
    return f" ({', '.join(names)} could)" if names else ""


def _is_ours(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("quantized_by") == MAKER["quantized_by"]
