"""Tensors that are spread over processes, gathered one at a time for the first process, which alone writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import distributed

from bowline.errors import CheckpointError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.tree.sharding import meshes_of, whole_tensor

__all__ = ["Whole", "first_writes", "with_those_elsewhere"]

Result = TypeVar("Result")
Whole = Callable[[str], torch.Tensor]
"""Gives the tensor of a name as one whole tensor."""
GATHER, DONE, FAILED = "gather", "done", "failed"


def with_those_elsewhere(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all processes by name, as stages of a pipeline have them; those of others only are on meta.

    Every process of the default group has to call this; all get the same names in the same order.
    """
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    found = {name: described for each in everyone for name, described in each.items()}
    return {
        name: tensors[name] if name in tensors else torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in found.items()
    }


def first_writes(tensors: Mapping[str, torch.Tensor], write: Callable[[Whole], Result]) -> Result:
    """Runs `write(whole)` on the first process; `whole(name)` is that tensor, gathered from all processes if spread.

    A tensor that is on meta is sent by the first process that has it (`with_those_elsewhere`).

    Every process has to call this with the same names: all of the default group, or, if the tensors are on a mesh of
    one dimension that has some of them, those of the mesh. The others help to gather what the first asks for, in its
    order, and hold one whole tensor at a time. All return what `write` returned; if it raised, the first raises that,
    and the others a `CheckpointError` that says so. A process that is lost is a `CheckpointError` too.
    """
    group = _group_of(tensors)
    absent: list[Any] = [None] * distributed.get_world_size(group)
    with _reaching("the processes of a checkpoint cannot reach each other"):
        distributed.all_gather_object(absent, {name for name, tensor in tensors.items() if tensor.is_meta}, group=group)
    if distributed.get_rank(group) != 0:
        result: Result = _help(tensors, absent, group)
        return result

    def whole(name: str) -> torch.Tensor:
        if not (is_dtensor(tensors[name]) or tensors[name].is_meta):
            return tensors[name]
        with _reaching(f"{name}: cannot be gathered from all processes"):
            _tell(GATHER, name, group)
            return _gathered(name, tensors, absent, group)

    try:
        result = write(whole)
    except BaseException as error:
        with suppress(RuntimeError):  # of processes that are lost
            _tell(FAILED, str(error) or type(error).__name__, group)
        raise
    with _reaching("the checkpoint is written, but not all processes could be told"):
        _tell(DONE, result, group)
    return result


def _group_of(tensors: Mapping[str, torch.Tensor]) -> Any:
    """The processes that gather: all, or those of the one mesh that the tensors are on."""
    meshes = meshes_of(tensors.values())
    roots = [mesh._get_root_mesh() for mesh in meshes]
    count = distributed.get_world_size()
    if all(root.size() == count for root in roots) or any(tensor.is_meta for tensor in tensors.values()):
        return distributed.group.WORLD
    if len(meshes) == 1 and roots == meshes and meshes[0].ndim == 1:
        return meshes[0].get_group()
    shapes = " and ".join(str(tuple(root.shape)) for root in dict.fromkeys(roots))
    raise CheckpointError(
        f"the tensors are on meshes of the shape {shapes}, and there are {count} processes: expected a mesh of all "
        "processes, or one mesh of one dimension",
        help="make one mesh of all processes with init_device_mesh, and shard on its dimensions; or save with dcp.save",
    )


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Makes torch's error about a process that is lost a `CheckpointError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{what}: {said}",
            help="a process ended, or took longer than the group's timeout: see the errors of the others",
        ) from error


def _help(tensors: Mapping[str, torch.Tensor], absent: Sequence[Collection[str]], group: Any) -> Any:
    first = distributed.get_global_rank(group, 0)
    while True:
        message: list[Any] = [None]
        with _reaching(f"process {first}, which writes the checkpoint, cannot be heard"):
            distributed.broadcast_object_list(message, src=first, group=group)
        kind, content = message[0]
        if kind == GATHER:
            with _reaching(f"{content}: cannot be gathered from all processes"):
                _gathered(content, tensors, absent, group)
        elif kind == DONE:
            return content
        else:
            raise CheckpointError(
                f"process {first} could not write: {content}", help=f"see the error of process {first}"
            )


def _tell(kind: str, content: Any, group: Any) -> None:
    distributed.broadcast_object_list([(kind, content)], src=distributed.get_rank(), group=group)


@torch.no_grad()
def _gathered(
    name: str, tensors: Mapping[str, torch.Tensor], absent: Sequence[Collection[str]], group: Any
) -> torch.Tensor:
    """The whole tensor, on the first process and on those that have it."""
    rank, held = distributed.get_rank(group), tensors[name]
    sender = next(each for each, names in enumerate(absent) if name not in names)
    whole = held if held.is_meta else whole_tensor(held)
    if sender == 0 or rank not in (0, sender):
        return whole
    device = (
        torch.device("cpu") if distributed.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    )
    if rank == sender:
        distributed.send(whole.detach().to(device).contiguous(), distributed.get_global_rank(group, 0), group)
        return whole
    received = torch.empty(held.shape, dtype=held.dtype, device=device)
    distributed.recv(received, distributed.get_global_rank(group, sender), group)
    return received
