"""`RowShard`: the rows that this process has of a matrix split over processes (DTensor's `Shard(0)`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from bowline.errors import UsageError

__all__ = ["RowShard", "is_dtensor"]

PLAIN = (torch.Tensor, nn.Parameter)
_LIVE_PARTS = WeakIdKeyDictionary()
"""By weight: a weak reference to the local part that a lookup's graph keeps alive."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is spread over a mesh of processes. Imports nothing: a DTensor's class is loaded already.

    Example:
        >>> is_dtensor(torch.zeros(9, 4))
        False
    """
    if type(tensor) in PLAIN:
        return False
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


@dataclass(frozen=True, slots=True, eq=False)
class RowShard:
    """The rows `first` to `last` (exclusive) of weight (V, D), which this process has; `mesh` is one-dimensional.

    Gradients: the local part's gradient is the DTensor's, without communication. What is replicated (hidden states, a
    bias) gets the whole gradient on every process.
    """

    weight: Any
    mesh: Any
    first: int
    last: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> RowShard:
        """The rows of a DTensor (V, D) that this process has.

        Raises:
            UsageError: it is not split by its rows over a one-dimensional mesh, some process has no rows, or the rows
                are split otherwise than torch splits them. The first two are raised on every process.
        """
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spread: Any = weight
        mesh, placements, shape = spread.device_mesh, tuple(spread.placements), tuple(spread.shape)
        seen = f"weight {shape} is a DTensor with placements {list(placements)} on a mesh {tuple(mesh.shape)}"
        if placements != (Shard(0),):
            way_out = "weight.redistribute(placements=[Shard(0)])"
            if mesh.ndim != 1:
                way_out = "shard the weight on the one-dimensional mesh of tensor parallelism, such as mesh['tp']"
            elif placements[0].is_replicate():
                way_out = "pass weight.to_local(), or shard its rows"
            raise UsageError(
                f"{seen}: expected [Shard(dim=0)] on a one-dimensional mesh, its rows split over the processes",
                help=way_out,
            )
        size, count = shape[0], mesh.size()
        if -(-size // count) * (count - 1) >= size:
            raise UsageError(
                f"{seen}: leaves a process without rows, expected at least one row for each",
                help="shard it over fewer processes, or pad the vocabulary and pass mask_ids",
            )
        (rows, *_), (first, *_) = compute_local_shape_and_global_offset(spread.shape, mesh, placements)
        if len(spread._local_tensor) != rows:
            raise UsageError(
                f"{seen}: this process has {len(spread._local_tensor)} rows, expected {rows}",
                help="shard the whole matrix with torch.distributed.tensor.distribute_tensor",
            )
        return cls(weight, mesh, int(first), int(first) + rows)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether the weight is a DTensor that is split by its rows over a one-dimensional mesh."""
        if not is_dtensor(weight):
            return False
        spread: Any = weight
        return bool(len(spread.placements) == 1 and spread.placements[0].is_shard(0))

    def part(self) -> torch.Tensor:
        """This process's rows, a plain tensor: the one that a lookup's graph keeps alive, if there is one.

        Both ends of a tie then have one tensor, so that their gradients are added in one buffer.
        """
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            alone: torch.Tensor = self.weight.to_local()
            return alone
        reference: TensorWeakRef | None = _LIVE_PARTS.get(self.weight)
        live: torch.Tensor | None = None if reference is None else reference()
        local = self.weight._local_tensor
        if live is None or (live.data_ptr(), live.shape, live.dtype) != (local.data_ptr(), local.shape, local.dtype):
            live = self.weight.to_local()
            assert live is not None
            _LIVE_PARTS[self.weight] = TensorWeakRef(live)
        return live

    def replicated(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same on every process, as a plain one whose gradients are summed over the processes.

        A DTensor that is sharded is gathered first, and its gradient is then reduced and scattered.
        """
        from torch.distributed.tensor import Partial, Replicate

        if not is_dtensor(tensor) and not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        spread = self._on_mesh(tensor).redistribute(placements=[Replicate()])
        whole: torch.Tensor = spread.to_local(grad_placements=[Partial()])
        return whole

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """A DTensor as a plain tensor that is whole on every process, and whose gradient is whole on every process."""
        from torch.distributed.tensor import Replicate

        if not is_dtensor(tensor):
            return tensor
        whole: torch.Tensor = self._on_mesh(tensor).redistribute(placements=[Replicate()]).to_local()
        return whole

    def rows_of(self, vector: torch.Tensor) -> torch.Tensor:
        """This process's part of a vector (V,), such as a bias; the vector is whole everywhere, or split as the weight.

        The gradient of a vector that is whole is gathered.
        """
        from torch.distributed.tensor import Shard

        local: torch.Tensor = self._on_mesh(vector).redistribute(placements=[Shard(0)]).to_local()
        return local

    def split(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor (..., V) whose part (..., V') on this process is `local`, one column for each of its rows."""
        from torch.distributed.tensor import DTensor, Shard

        lead = local.shape[:-1]
        shape = torch.Size((*lead, len(self.weight)))
        stride = torch.empty(shape, device="meta").stride()
        found: torch.Tensor = DTensor.from_local(
            local, self.mesh, [Shard(len(lead))], run_check=False, shape=shape, stride=stride
        )
        return found

    def whole_on_each(self, local: torch.Tensor) -> torch.Tensor:
        """The replicated DTensor whose value on each process is `local`."""
        return self._on_mesh(local)  # type: ignore[no-any-return]

    def _on_mesh(self, tensor: Any) -> Any:
        if not is_dtensor(tensor):
            from torch.distributed.tensor import DTensor, Replicate

            return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        if tensor.device_mesh != self.mesh:
            raise UsageError(
                f"a DTensor {tuple(tensor.shape)} is on the mesh {tensor.device_mesh}, and the weight on {self.mesh}: "
                "expected one mesh for both",
                help="pass its part on the weight's mesh, as a plain tensor or a DTensor",
            )
        return tensor

    def summed(self, tensor: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """The sum over the processes of a tensor that is not used again, with the gradient that each process has.

        `keep` is a tensor that the result's graph keeps alive, such as the local part.
        """
        function: Any = _Summed  # `apply` has no types
        total: torch.Tensor = function.apply(tensor, self.mesh.get_group(), keep)
        return total

    def same_everywhere(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Whether all processes have the same ids (...) of int64 or int32: a truth value on the device.

        On the CPU, ids that differ raise on every process. On a GPU, reading the truth value would stall the queue:
        there the caller makes NaN of the result. Costs one all-reduce of two numbers.

        Raises:
            UsageError: as above.
        """
        flat = ids.reshape(-1).long()
        places = 2 * torch.arange(len(flat), device=flat.device) + 1
        key = ((flat + 7919) * places).sum().add_(104729 * len(flat)).remainder_(2**48)
        both = torch.stack([key, -key])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, self.mesh.get_group())
        same = both[0] == -both[1]
        if same.device.type == "cpu" and not same:
            raise UsageError(
                f"{name} differ between the processes that share the weight's rows: expected the same on each of them, "
                "because each computes its own rows' part for all positions",
                help="under data parallelism (FSDP) use the weight inside the model's forward, where it is whole",
                argument=name,
            )
        return same


class _Summed(torch.autograd.Function):
    """The sum over a group; every process has the whole gradient, so it is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, keep: torch.Tensor) -> torch.Tensor:
        ctx.keep = keep
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.SUM, group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None
