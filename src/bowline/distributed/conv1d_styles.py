"""Tensor-parallel styles of GPT-2's `Conv1D`, a linear layer whose weight is stored as (in, out)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseConv1D", "RowwiseConv1D"]


class ColwiseConv1D(ColwiseParallel):
    """torch's `ColwiseParallel`, which splits the outputs: here the weight's second axis, and the bias."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class RowwiseConv1D(RowwiseParallel):
    """torch's `RowwiseParallel`, which splits the inputs: here the weight's first axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts: tuple[Any, ...] = (Shard(-1),)
        return _split(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _split(style: Any, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]) -> nn.Module:
    def spread(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(part.named_parameters(recurse=False)):
            made = distribute_tensor(parameter.detach(), mesh, [placements[key]])
            part.register_parameter(key, nn.Parameter(made, requires_grad=parameter.requires_grad))

    return distribute_module(
        module,
        mesh,
        spread,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )
