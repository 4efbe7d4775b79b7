"""What each process runs: saves of models on one dimension of a mesh, and on some processes only; a sync over two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bowline.distributed import shard_groups
from bowline.errors import BowlineError
from bowline.nn import check_weight_sync, load_checkpoint, save_checkpoint
from bowline.nn.tree.sharding import whole_tensor
from tests.distributed.models import built
from tests.distributed.process_group import joined

NAME = "gpt2"


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = built(NAME)
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    return model


def saved(mesh: DeviceMesh, place: Path) -> dict[str, Any]:
    """The names of the files, or the error; and whether a load gives back the same."""
    model = sharded(mesh)
    try:
        files = save_checkpoint(model, place)
    except BowlineError as error:
        return {"refused": str(error)}
    again = sharded(mesh)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_checkpoint(again, place)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    synced = str(check_weight_sync(model, again))
    return {
        "files": files,
        "loaded": all(torch.equal(*map(whole_tensor, pair)) for pair in pairs),
        "synced": synced,
    }


def synced_over(mesh: DeviceMesh) -> list[str]:
    """What each process hears if the last one's copy alone is stale, and after that none is."""
    model, copy = sharded(mesh), built(NAME)
    head: Any = copy.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.detach().clone())
    last = distributed.get_rank() == distributed.get_world_size() - 1
    if last:
        head.weight.data[3] += 1
    heard = []
    for _ in range(2):
        try:
            heard.append(str(check_weight_sync(model, copy if last else None)))
        except BowlineError as error:
            heard.append(str(error))
        if last:
            head.weight.data.copy_(copy.get_input_embeddings().weight.data)  # type: ignore[operator]
    return heard


def main() -> None:
    with joined(30):
        out, rank, count = Path(sys.argv[1]), distributed.get_rank(), distributed.get_world_size()
        upper = list(range(count // 2, count))
        both = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replica", "shard"))
        some = DeviceMesh("cpu", upper)
        grid = DeviceMesh("cpu", [[each] for each in upper], mesh_dim_names=("replica", "shard"))
        found: dict[str, Any] = {"dimension": saved(both["shard"], out / "dimension"), "synced": synced_over(both)}
        if rank in upper:
            found["some"] = saved(some, out / "some")
            found["grid"] = saved(grid, out / "grid")
        torch.save(found, out / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
