"""Tensors that are spread over processes, gathered one at a time for the first process, which alone writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from bowline.errors import CheckpointError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.tree.sharding import whole_tensor

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

    Every process of the default group has to call this with the same names. The others help to gather what the first
    asks for, in its order, and hold one whole tensor at a time. All return what `write` returned; if it raised, the
    first raises that, and the others a `CheckpointError` that says so.
    """
    absent: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(absent, {name for name, tensor in tensors.items() if tensor.is_meta})
    if distributed.get_rank() != 0:
        result: Result = _help(tensors, absent)
        return result

    def whole(name: str) -> torch.Tensor:
        if not (is_dtensor(tensors[name]) or tensors[name].is_meta):
            return tensors[name]
        _tell(GATHER, name)
        return _gathered(name, tensors, absent)

    try:
        result = write(whole)
    except BaseException as error:
        _tell(FAILED, str(error) or type(error).__name__)
        raise
    _tell(DONE, result)
    return result


def _help(tensors: Mapping[str, torch.Tensor], absent: Sequence[Collection[str]]) -> Any:
    while True:
        message: list[Any] = [None]
        distributed.broadcast_object_list(message, src=0)
        kind, content = message[0]
        if kind == GATHER:
            _gathered(content, tensors, absent)
        elif kind == DONE:
            return content
        else:
            raise CheckpointError(f"process 0 could not write: {content}", help="see the error of process 0")


def _tell(kind: str, content: Any) -> None:
    distributed.broadcast_object_list([(kind, content)], src=0)


@torch.no_grad()
def _gathered(name: str, tensors: Mapping[str, torch.Tensor], absent: Sequence[Collection[str]]) -> torch.Tensor:
    """The whole tensor, on the first process and on those that have it."""
    rank, held = distributed.get_rank(), tensors[name]
    sender = next(each for each, names in enumerate(absent) if name not in names)
    whole = held if held.is_meta else whole_tensor(held)
    if sender == 0 or rank not in (0, sender):
        return whole
    device = torch.device("cpu") if distributed.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    if rank == sender:
        distributed.send(whole.detach().to(device).contiguous(), 0)
        return whole
    received = torch.empty(held.shape, dtype=held.dtype, device=device)
    distributed.recv(received, sender)
    return received
