"""What each process of a run has: its part of the model, and its share of the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bowline.distributed.shard_groups import shard_groups
from bowline.distributed.sharding_check import check_before_sharding
from bowline.distributed.tensor_parallel import apply_tensor_parallel
from bowline.errors import UsageError
from bowline.train.parallel.pipeline import Pipeline
from bowline.train.parallel.processes import Processes

__all__ = ["Parallelism"]


class Parallelism:
    """The place of this process in the run's mesh.

    Processes along `ddp` and `fsdp` have batches of their own; those along `tp` and `pp` have the same ones.

    Args:
        processes: all processes of the run.
        sizes: the number of processes along each dimension, from the outermost (`mesh_sizes`).
        device: where the model is.
    """

    def __init__(self, processes: Processes, sizes: Mapping[str, int], device: torch.device) -> None:
        self.processes = processes
        self.sizes: Mapping[str, int] = {name: size for name, size in sizes.items() if size > 1}
        self.spread = bool(self.sizes.keys() - {"ddp"})
        """Whether a process has only a part of the model."""
        self.mesh: Any = None
        if self.spread:
            names = tuple(self.sizes)
            self.mesh = init_device_mesh(device.type, tuple(self.sizes.values()), mesh_dim_names=names)
        self.pipeline: Pipeline | None = None
        """The stages of a model that `spread_out` has cut into stages."""
        self.replicas = self._size("ddp") * self._size("fsdp")
        """The number of different shares of a step's batches."""
        self.replica = self._at("ddp") * self._size("fsdp") + self._at("fsdp") if self.spread else processes.rank

    @property
    def counts(self) -> bool:
        """Whether this process speaks for its share of the batches: of those that have the same, one does."""
        return self._at("tp") == 0 and self._at("pp") == self._size("pp") - 1

    def share(self, accumulation: int) -> range:
        """The numbers of this process's batches in a step.

        Raises:
            UsageError: the batches of a step cannot be shared out evenly.
        """
        if accumulation % self.replicas:
            raise UsageError(
                f"accumulation={accumulation} on {self.replicas} processes with batches of their own: expected a "
                f"multiple of {self.replicas}, because it counts the batches of one step on all processes together",
                help=f"accumulation={self.replicas * max(1, accumulation // self.replicas)}",
                argument="accumulation",
            )
        return range(self.replica, accumulation, self.replicas)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all shares of the batches, in float64; every process waits for all others."""
        return self.processes.total(values if self.counts else [0.0] * len(values))

    def spread_out(self, model: nn.Module, before: Callable[[int], Any]) -> None:
        """Reduces `model`, in place, to this process's part of it. The optimizer has to be built afterwards.

        Args:
            model: the whole model.
            before: see `Pipeline`.

        Raises:
            TieError: a tie that would break by that.
            UsageError: a model without stages, or a number of stages that it cannot have.
        """
        if not self.spread:
            return
        check_before_sharding(model, self.mesh)
        root = model
        if "pp" in self.sizes:
            self.pipeline = Pipeline(model, self.mesh["pp"], before)
            root = self.pipeline.stage
        if "tp" in self.sizes:
            apply_tensor_parallel(model, self.mesh["tp"])
        if "fsdp" in self.sizes:
            from torch.distributed.fsdp import fully_shard

            names = tuple(name for name in ("ddp", "fsdp") if name in self.sizes)
            for group in shard_groups(root):
                fully_shard(group, mesh=self.mesh[names])
        if self.pipeline is not None:
            self.pipeline.tie()

    def reshard(self, model: nn.Module) -> None:
        """Frees the parameters that FSDP2 gathered for a forward pass, which no backward pass has freed."""
        root = model if self.pipeline is None else self.pipeline.stage
        for module in root.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()

    def _size(self, name: str) -> int:
        return self.sizes.get(name, 1)

    def _at(self, name: str) -> int:
        return self.mesh.get_local_rank(name) if self.mesh is not None and name in self.sizes else 0
