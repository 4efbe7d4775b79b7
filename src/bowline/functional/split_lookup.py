"""The lookup in a matrix whose rows are split over processes: each looks up its own, and the results are added."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bowline.functional.row_shard import RowShard, is_dtensor

__all__ = ["split_lookup"]


# traced, the gradients of replicated DTensors would not be summed
@torch.compiler.disable  # type: ignore[untyped-decorator]
def split_lookup(
    look_up: Callable[..., torch.Tensor], ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None
) -> torch.Tensor:
    """`tied_embedding` of a DTensor weight (V, D) that is `Shard(0)`; `look_up` is that function.

    ids (...) are the same on every process. The rows (..., D) are whole on every process: a plain tensor, or a
    replicated DTensor if the ids are a DTensor.

    Raises:
        UsageError: the weight is split in another way, or the ids differ (on a GPU the rows are NaN).
        IndexError: an id that is no row (on the CPU; on a GPU the kernel's own assertion).
    """
    shard = RowShard.of(weight)
    whole, size = shard.gathered(ids), len(weight)
    same = shard.same_everywhere("ids", whole)
    foreign = ((whole >= 0) & (whole < shard.first)) | ((whole >= shard.last) & (whole < size))
    local_ids = (whole - shard.first).masked_fill(foreign, 0)  # an id that is no row stays none, and so is refused
    padding = -1 if padding_idx is None else padding_idx % size
    here = padding - shard.first if shard.first <= padding < shard.last else None
    part = shard.part()
    rows = shard.summed(look_up(local_ids, part, here).masked_fill(foreign[..., None], 0.0), part)
    if rows.device.type != "cpu":
        rows = rows.masked_fill(~same, torch.nan)
    return shard.whole_on_each(rows) if is_dtensor(ids) else rows
