"""Finds the ends of a model's ties in a copy of the model: in a module, or among named tensors as of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.table_slots import is_head, is_lookup, tie_ends

__all__ = ["Copy", "copied_ends"]

Copy: TypeAlias = nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, a state dict, or pairs `(name, tensor)`."""


def copied_ends(copy: Copy, ends: Mapping[str, Slot]) -> dict[str, tuple[str, torch.Tensor]]:
    """For each of the model's `ends` that the copy has, the name there and the tensor.

    The name is the end's own, or one that differs from it by leading parts, such as a wrapper's `module.`. In a module,
    an end without such a name is the one embedding, or the one linear layer, whose matrix has its width and at least
    its rows.

    Raises:
        TieError: several tensors of the copy may be that end.
        UsageError: `copy` is not a copy.
    """
    held = tie_ends(copy) if isinstance(copy, nn.Module) else {}
    tensors = {name: place.tensor for name, place in held.items()} if held else _tensors(copy, ends)
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for end, place in ends.items():
        names = [end] if end in tensors else [name for name in tensors if _alike(name, end)]
        if not names and held:
            names = _by_kind(place, held)
        if len({id(tensors[name]) for name in names}) > 1:
            raise TieError(
                f"the copy has {' and '.join(names)}, expected one tensor for {end}",
                help=f'pass a mapping that names that tensor "{end}"',
            )
        if names:
            found[end] = (names[0], tensors[names[0]])
    return found


def _tensors(copy: Any, ends: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """The tensors that may be an end, by name; of a generator's tensors no others are kept."""
    if isinstance(copy, nn.Module):
        return {}
    if not isinstance(copy, Iterable) or isinstance(copy, (str, bytes, torch.Tensor)):
        raise UsageError(
            f"copy is a {type(copy).__name__}, expected a module, a state dict, or pairs (name, tensor)",
            argument="copy",
        )
    kept = {}
    for pair in copy.items() if isinstance(copy, Mapping) else copy:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UsageError(
                f"copy has an entry {pair!r:.60}, expected (name, tensor)",
                help="pass copy.state_dict(), or copy.named_parameters(remove_duplicate=False)",
                argument="copy",
            )
        name, tensor = pair
        if any(_alike(name, end) for end in ends):
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"copy: {name} is a {type(tensor).__name__}, expected a torch.Tensor", argument="copy")
            kept[name] = tensor
    return kept


def _alike(one: str, other: str) -> bool:
    """Whether two names are one, or one ends with the other, which names a module and a tensor at least."""
    short, long = sorted((one.replace("_orig_mod.", ""), other.replace("_orig_mod.", "")), key=len)
    return short == long or ("." in short and long.endswith(f".{short}"))


def _by_kind(end: Slot, held: Mapping[str, Slot]) -> list[str]:
    kind: Callable[[nn.Module], bool] = is_lookup if is_lookup(end.module) else is_head
    shape = end.tensor.shape
    return [
        name
        for name, place in held.items()
        if kind(end.module)
        and kind(place.module)
        and place.attribute == end.attribute
        and place.tensor.ndim == len(shape)
        and place.tensor.shape[1:] == shape[1:]
        and len(place.tensor) >= len(end.tensor)
    ]
