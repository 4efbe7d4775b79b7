"""What one of two processes runs: a tied model under DDP and FSDP2, its gradients saved for the test to compare."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import distributed, nn

from bowline.functional import shared_gradient
from tests.functional.lookup.ends import addresses, body, head, loss_of, matrix, module, tokens

BATCHES = 3
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_as_bucket_view": False},
    "ddp with bucket views": {"gradient_as_bucket_view": True},
    "ddp, static": {"static_graph": True},
    "ddp with bucket views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "ddp without sync": {"gradient_as_bucket_view": False},
    "ddp without sync, with bucket views": {"gradient_as_bucket_view": True},
    "fsdp": {"reshard_after_forward": False},
    "fsdp that frees the matrix between": {"reshard_after_forward": True},
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = module.tied_embedding(ids, self.weight)
        return loss_of(head(body(rows * self.scale), self.weight))


def batch(rank: int, step: int) -> torch.Tensor:
    return tokens(seed=10 * rank + step)


def train(kind: str, rank: int) -> dict[str, Any]:
    """The gradient after batches whose gradients are added, how many heads and how many dense lookups or copies."""
    model: Any = Tied()
    if kind.startswith("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **KINDS[kind])
    else:
        model = nn.parallel.DistributedDataParallel(model, **KINDS[kind])
    dense: list[int] = []
    make, copy = module.summed_rows, shared_gradient._copy

    def counting(*args: Any) -> torch.Tensor:
        dense.append(args[2])
        result: torch.Tensor = make(*args)
        return result

    def counting_copies(gradient: torch.Tensor) -> torch.Tensor:
        dense.append(len(gradient))
        return copy(gradient)

    addresses.clear()
    module.summed_rows = shared_gradient.summed_rows = counting  # type: ignore[assignment, attr-defined]
    shared_gradient._copy = counting_copies
    for step in range(BATCHES):
        if step == 1 and "without sync" in kind:
            with model.no_sync():
                model(batch(rank, step)).backward()
        else:
            model(batch(rank, step)).backward()
    module.summed_rows = shared_gradient.summed_rows = make  # type: ignore[attr-defined]
    shared_gradient._copy = copy
    found = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    gradient: Any = found["weight"]
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    return {"gradient": gradient.clone(), "heads": len(addresses), "dense": len(dense)}


def main(rank: int, store: str, out: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.save({kind: train(kind, rank) for kind in KINDS}, f"{out}.{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    # FSDP's mesh keeps the group, and a thread of gloo that outlives the interpreter may abort the process.
    os._exit(0)
