"""Refuses models wrapped for data parallelism, whose parameter lists a change of ties would make wrong."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bowline.errors import TieError
from bowline.nn.tree.slots import expect_module

__all__ = ["refuse_wrapped"]


def refuse_wrapped(model: nn.Module) -> None:
    """Raise a `TieError` if a part of `model` is wrapped for data parallelism (DDP, FSDP)."""
    expect_module(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel) or kind in ("FullyShardedDataParallel", "FlatParamHandle"):
            raise TieError(
                f"{name or type(model).__name__}: is wrapped in {kind}, which already has a list of its parameters",
                help="tie or untie the model first, then wrap it and build the optimizer",
            )
