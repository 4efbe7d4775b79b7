"""Ties across processes, on `torch.distributed`: what to shard together, what to check before, what to keep equal."""

from __future__ import annotations

from bowline.distributed.shard_groups import shard_groups
from bowline.distributed.sharding_check import check_before_sharding

__all__ = ["check_before_sharding", "shard_groups"]
