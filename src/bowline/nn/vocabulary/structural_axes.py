"""Finds the vocabulary axes of a module outside the families' table by its structure, from the input embedding on.

Ambiguous axes are refused, because an axis that happens to be as long as the vocabulary would be resized with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.table_slots import TableEnd, TableSlot, is_head, is_lookup

__all__ = ["infer_axes", "input_embedding"]

WAY_OUT = "name every tensor of the vocabulary with its axis: axes={name: axis}"


def infer_axes(
    model: nn.Module, known: Mapping[str, Slot], given: Mapping[str, int] | None = None, settled: Collection[str] = ()
) -> dict[str, int]:
    """The vocabulary axis of each tensor that has one, by name.

    The vocabulary is as long as the input embedding has rows. Its tensors are the embedding, whatever is tied to it or
    declared so, the one `Linear` (or other matrix of that shape) with as many outputs, their biases, and buffers of
    shape (1, V). `given` are axes already known; tensors with `settled` names are skipped.

    Raises:
        TieError: there is no embedding, or another axis is as long as the vocabulary and may or may not belong to it.
    """
    axes = dict(given or {})
    if axes:
        table = next((known[name].tensor for name in axes if is_lookup(known[name].module)), None)
        table = known[next(iter(axes))].tensor if table is None else table
    else:
        embedding = input_embedding(model, known)
        table, axes[embedding.name] = embedding.tensor, 0
    size = int(table.shape[0])
    if table.ndim != 2 or table.shape[1] == size:
        raise TieError(
            f"{next(iter(axes))} has shape {tuple(table.shape)}, so it is unclear which axis is the vocabulary's",
            help=WAY_OUT,
        )
    mine = {id(known[name].tensor) for name in axes}
    _follow_declarations(model, known, size, mine)
    inside = [slot for slot in known.values() if slot.name not in settled]
    rest = _rest(inside, size, mine)
    if not _has_head(known.values(), mine):
        heads = {id(slot.tensor): slot for slot in rest if _may_be_head(slot, table)}
        if len(heads) == 1:
            mine |= set(heads)
    mine |= {id(bias) for slot in known.values() if id(slot.tensor) in mine and (bias := _bias(slot)) is not None}
    mine |= {id(slot.tensor) for slot in _rest(inside, size, mine) if _is_logit_bias(slot, size)}
    rest = _rest(inside, size, mine)
    for name, module in model.named_modules():
        replaced = "weight" not in module._parameters and not isinstance(module, TableEnd)
        if replaced and module.__dict__.get("out_features") == size:
            raise TieError(
                f"{name}: is a {type(module).__name__} with {size} outputs but no weight of its own, expected a plain "
                "parameter",
                help="resize before quantising, and remove parametrizations first",
            )
    if rest:
        names = ", ".join(f"{slot.name} {tuple(slot.tensor.shape)}" for slot in rest[:4])
        raise TieError(
            f"{next(iter(axes))} has {size} rows; other tensors have an axis of that length, which may or may not be "
            f"the vocabulary's: {names}{' and others' if len(rest) > 4 else ''}",
            help=WAY_OUT,
        )
    for slot in known.values():
        if id(slot.tensor) in mine:
            axes.setdefault(slot.name, 1 if _is_row(slot.tensor, size) else 0)
    return axes


def input_embedding(model: nn.Module, known: Mapping[str, Slot]) -> Slot:
    """The model's declared input embedding; else an embedding that is tied to something; else the longest one.

    Raises:
        TieError: the model has no embedding.
    """
    held = {id(slot.tensor): slot for slot in reversed(list(known.values()))}
    named = _weight_of(model, "get_input_embeddings")
    if named is not None and id(named) in held:
        return held[id(named)]
    tables = [slot for slot in known.values() if isinstance(slot.module, nn.EmbeddingBag) or is_lookup(slot.module)]
    mine = [slot for slot in tables if isinstance(slot, TableSlot) or slot.is_parameter]
    tables = [slot for slot in mine if slot.attribute == "weight"]
    if not tables:
        raise TieError(f"{type(model).__name__} has no nn.Embedding, so its vocabulary is unknown", help=WAY_OUT)
    sources = {tie.source for tie in find_ties(model)}
    return max(tables, key=lambda slot: (slot.name in sources, len(slot.tensor)))


def _weight_of(model: nn.Module, getter: str) -> torch.Tensor | None:
    find = getattr(model, getter, None)
    try:
        module = find() if callable(find) else None
        weight = module.table.values if isinstance(module, TableEnd) else getattr(module, "weight", None)
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return weight if isinstance(weight, torch.Tensor) else None


def _follow_declarations(model: nn.Module, known: Mapping[str, Slot], size: int, mine: set[int]) -> None:
    """Axes from `get_output_embeddings` and declared ties; tied biases of that length count as the head's."""
    head = _weight_of(model, "get_output_embeddings")
    if head is not None and head.ndim == 2 and len(head) == size:
        mine.add(id(head))
    for tie in declared_ties(model, flag=True):
        ends = [known[name].tensor for name in (tie.source, tie.target) if name in known]
        fit = [end for end in ends if end.ndim in (1, 2) and len(end) == size]
        if any(id(end) in mine or end.ndim == 1 for end in fit):
            mine |= {id(end) for end in fit}


def _rest(slots: Iterable[Slot], size: int, mine: set[int]) -> list[Slot]:
    """Tensors with an axis of that length that are not yet assigned to the vocabulary, each once."""
    found = {id(slot.tensor): slot for slot in slots if size in slot.tensor.shape and id(slot.tensor) not in mine}
    return list(found.values())


def _has_head(slots: Iterable[Slot], mine: set[int]) -> bool:
    return any(id(slot.tensor) in mine and slot.tensor.ndim == 2 and not is_lookup(slot.module) for slot in slots)


def _may_be_head(slot: Slot, table: torch.Tensor) -> bool:
    shape = slot.tensor.shape
    if slot.tensor.ndim != 2 or shape[0] != len(table) or shape[1] == shape[0] or not slot.is_parameter:
        return False
    if isinstance(slot.module, nn.Linear):
        return slot.attribute == "weight"
    return not _is_torchs(slot.module) and shape[1] == table.shape[1]


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


def _bias(slot: Slot) -> torch.Tensor | None:
    bias = slot.module._parameters.get("bias")
    multiplies = is_head(slot.module) and slot.attribute == "weight"
    return bias if multiplies and bias is not None and len(bias) == len(slot.tensor) else None


def _is_logit_bias(slot: Slot, size: int) -> bool:
    if not slot.tensor.is_floating_point():
        return False
    if _is_row(slot.tensor, size):
        return not slot.is_parameter
    return slot.tensor.ndim == 1 and slot.attribute.endswith("bias") and not _is_torchs(slot.module)


def _is_row(tensor: torch.Tensor, size: int) -> bool:
    return tuple(tensor.shape) == (1, size) and size != 1
