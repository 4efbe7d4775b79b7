"""Records of tensors with a vocabulary axis, and checks that each can be resized in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bowline.errors import TieError
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.storages import overlapping
from bowline.nn.tree.table_slots import SharedTable, TableSlot, is_head

__all__ = ["Axis", "Stated", "Vocabulary", "axes_of", "check_tensors"]


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One tensor and its axis over the vocabulary; `slots` are all places in the model that hold the tensor.

    `excess` is how much longer than the vocabulary the axis is. Rows past the vocabulary (eight in Mllama's
    embedding, the padding row in Moshi's) stay its last rows. `stand_in` is the row used for the tokens that a shorter
    axis leaves out.
    """

    slots: tuple[Slot, ...]
    axis: int
    excess: int = 0
    stand_in: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself."""
        return self.slots[0].tensor

    @property
    def table(self) -> SharedTable | None:
        """The quantised table whose codes the tensor is, or `None`."""
        first = self.slots[0]
        return first.end.table if isinstance(first, TableSlot) else None

    @property
    def name(self) -> str:
        """Its first name."""
        return self.slots[0].name

    @property
    def length(self) -> int:
        """The present length of the axis."""
        return int(self.tensor.shape[self.axis])


@dataclass(frozen=True, slots=True, eq=False)
class Stated:
    """A place where a config states the size: the dotted `path` in the config of the module called `prefix`."""

    prefix: str
    config: Any
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """All axes of one vocabulary, its number of tokens, and the configs that state it.

    `fixed_ids` is true if the model computes with the ids themselves, so that no id may change.
    """

    size: int
    axes: tuple[Axis, ...]
    stated: tuple[Stated, ...] = ()
    fixed_ids: bool = False

    @property
    def tail(self) -> int:
        """The number of rows past the vocabulary in the longest axis."""
        return max(0, *(axis.excess for axis in self.axes))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of every tensor."""
        return tuple(slot.name for axis in self.axes for slot in axis.slots)


def axes_of(
    known: Mapping[str, Slot],
    wanted: Mapping[str, int],
    size: int,
    stand_ins: Mapping[str, int] | None = None,
) -> tuple[Axis, ...]:
    """Each tensor of `wanted` (name to axis) once, with every other name that it has, and with a `Linear`'s bias.

    Raises:
        TieError: one tensor is named with two different axes.
    """
    stand_ins = stand_ins or {}
    holders: dict[int, list[Slot]] = {}
    for slot in known.values():
        holders.setdefault(id(slot.tensor), []).append(slot)
    chosen: dict[int, tuple[str, int]] = {}
    for name, axis in [*wanted.items(), *_biases(known, wanted, holders)]:
        first, axis_before = chosen.setdefault(id(known[name].tensor), (name, axis))
        if axis_before != axis:
            raise TieError(
                f"{first} and {name} are one tensor, but are given two axes, {axis_before} and {axis}",
                help="give each tensor one vocabulary axis",
            )
    made = []
    for key, (name, axis) in chosen.items():
        first_slot = known[name]
        others = [slot for slot in holders[key] if slot is not first_slot]
        excess = int(first_slot.tensor.shape[axis]) - size
        made.append(Axis((first_slot, *others), axis, excess, stand_ins.get(name)))
    return tuple(made)


def _biases(
    known: Mapping[str, Slot], wanted: Mapping[str, int], holders: Mapping[int, list[Slot]]
) -> Iterable[tuple[str, int]]:
    for name, axis in wanted.items():
        for slot in holders[id(known[name].tensor)]:
            if axis == 0 and slot.attribute == "weight" and is_head(slot.module):
                bias = slot.name.removesuffix("weight") + "bias"
                if bias in known:
                    yield bias, 0


def check_tensors(known: Mapping[str, Slot], axes: Iterable[Axis]) -> None:
    """Raise for tensors that cannot be resized in place.

    Raises:
        TieError: a quantised, sharded, sparse or inference tensor, or one that shares another tensor's memory.
    """
    for axis in axes:
        tensor = axis.tensor
        if not is_plain(tensor):
            raise TieError(
                f"{axis.name}: is a {type(tensor).__name__} ({tensor.dtype}, {tensor.layout}), expected a plain dense "
                "tensor",
                help="resize before quantising, sharding or wrapping, or dequantise first",
            )
        if tensor.is_inference():
            raise TieError(
                f"{axis.name}: was made in torch.inference_mode, which fixes its size",
                help="build or load the model outside inference_mode",
            )
    mine = {id(axis.tensor) for axis in axes}
    tensors = {id(slot.tensor): (slot.name, slot.tensor) for slot in known.values()}
    for one, other in overlapping([(key, tensor) for key, (_, tensor) in tensors.items()]):
        if one in mine or other in mine:
            raise TieError(
                f"{tensors[other][0]} and {tensors[one][0]} share memory, and resizing would separate them",
                help="tie_weights makes them one Parameter",
            )
