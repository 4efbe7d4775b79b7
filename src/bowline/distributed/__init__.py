"""Ties across processes, on `torch.distributed`: what to shard together, what to check before, what to keep equal."""

from __future__ import annotations

from bowline.distributed.pipeline_tie import PipelineTie
from bowline.distributed.shard_groups import shard_groups
from bowline.distributed.sharding_check import check_before_sharding
from bowline.distributed.tensor_parallel import apply_tensor_parallel, tensor_parallel_plan
from bowline.distributed.tied_state import TiedState

__all__ = [
    "PipelineTie",
    "TiedState",
    "apply_tensor_parallel",
    "check_before_sharding",
    "shard_groups",
    "tensor_parallel_plan",
]
