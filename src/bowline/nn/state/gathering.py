"""Tensors that are spread over processes, gathered one at a time for the first process, which alone writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed

from bowline.errors import CheckpointError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.tree.sharding import whole_tensor

__all__ = ["Whole", "first_writes"]

Result = TypeVar("Result")
Whole = Callable[[str], torch.Tensor]
"""Gives the tensor of a name as one whole tensor."""
GATHER, DONE, FAILED = "gather", "done", "failed"


def first_writes(tensors: Mapping[str, torch.Tensor], write: Callable[[Whole], Result]) -> Result:
    """Runs `write(whole)` on the first process; `whole(name)` is that tensor, gathered from all processes if spread.

    Every process of the default group has to call this with the same names. The others help to gather what the first
    asks for, in its order, and hold one whole tensor at a time. All return what `write` returned; if it raised, the
    first raises that, and the others a `CheckpointError` that says so.
    """
    if distributed.get_rank() != 0:
        result: Result = _help(tensors)
        return result

    def whole(name: str) -> torch.Tensor:
        if not is_dtensor(tensors[name]):
            return tensors[name]
        _tell(GATHER, name)
        return _gathered(tensors[name])

    try:
        result = write(whole)
    except BaseException as error:
        _tell(FAILED, str(error) or type(error).__name__)
        raise
    _tell(DONE, result)
    return result


def _help(tensors: Mapping[str, torch.Tensor]) -> Any:
    while True:
        message: list[Any] = [None]
        distributed.broadcast_object_list(message, src=0)
        kind, content = message[0]
        if kind == GATHER:
            _gathered(tensors[content])
        elif kind == DONE:
            return content
        else:
            raise CheckpointError(f"process 0 could not write: {content}", help="see the error of process 0")


def _tell(kind: str, content: Any) -> None:
    distributed.broadcast_object_list([(kind, content)], src=0)


@torch.no_grad()
def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return whole_tensor(tensor)
