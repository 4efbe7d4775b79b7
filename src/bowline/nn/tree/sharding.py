"""What torch made of a parameter that several processes hold: a DTensor's placements, and FSDP2's own records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bowline.functional.row_shard import is_dtensor

__all__ = [
    "class_name",
    "fsdp_records",
    "local_part",
    "meshes_of",
    "placed_alike",
    "placement_of",
    "spread_like",
    "whole_tensor",
]


def class_name(module: nn.Module) -> str:
    """The name of the module's class; that of a class which `fully_shard` derived is the name of the class before.

    Example:
        >>> class_name(nn.Linear(2, 2))
        'Linear'
    """
    kind = type(module)
    derived = hasattr(kind, "_get_fsdp_state") and len(kind.__bases__) > 1
    return kind.__bases__[-1].__name__ if derived else kind.__name__


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part.detach()


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The meshes of those of the tensors that are DTensors, each once."""
    spread: Any = filter(is_dtensor, tensors)
    return list(dict.fromkeys(tensor.device_mesh for tensor in spread))


def placement_of(tensor: torch.Tensor) -> str:
    """How a tensor is spread, in words.

    Example:
        >>> placement_of(torch.zeros(9, 4))
        'whole on this process'
    """
    if not is_dtensor(tensor):
        return "whole on this process"
    spread: Any = tensor
    mesh = spread.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    parts = [
        f"{placed!r} on {size} processes" + (f" ({name})" if name else "")
        for placed, size, name in zip(spread.placements, mesh.shape, names, strict=True)
    ]
    return ", ".join(parts)


def spread_like(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor with the mesh and placements of `held`: this process's part of it is copied.

    Nothing is communicated, so every process must have the same `value`. Of a mapped file only the part is read.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread: Any = held
    mesh, placements = spread.device_mesh, tuple(spread.placements)
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    part = value[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    local = local_part(held)
    moved = part.to(dtype=local.dtype, device="cpu" if local.is_meta else local.device, copy=True).contiguous()
    made: torch.Tensor = DTensor.from_local(
        moved, mesh, placements, run_check=False, shape=value.shape, stride=spread.stride()
    )
    return made


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered from all processes of its mesh, which all have to call this; or the tensor itself.

    Dimension by dimension, because torch logs a warning about gathering along two at once.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    spread: Any = tensor
    placements = list(spread.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        spread = spread.redistribute(placements=placements)
    whole: torch.Tensor = spread.to_local()
    return whole


def placed_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same placements on the same mesh, or both are whole."""
    if is_dtensor(one) is not is_dtensor(other):
        return False
    a: Any = one
    b: Any = other
    return not is_dtensor(one) or (a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements))


def fsdp_records(model: nn.Module) -> dict[tuple[nn.Module, str], int]:
    """For each place that `fully_shard` manages, the number of the one parameter that FSDP2 keeps for it.

    Two places of a tie have one number, unless they were wrapped separately or tied after they were sharded.
    """
    found: dict[tuple[nn.Module, str], int] = {}
    for module in model.modules():
        state_of = getattr(type(module), "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            for record in group.fsdp_params:
                place = record._module_info
                homes = [(place.module, place.param_name)]
                homes += zip(place.shared_modules, place.shared_param_names, strict=True)
                found |= dict.fromkeys(homes, id(record))
    return found
