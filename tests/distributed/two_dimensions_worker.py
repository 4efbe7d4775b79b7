"""What each process runs: models split by tensor parallelism along one dimension and by FSDP2 along another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bowline.distributed import TiedState, apply_tensor_parallel, shard_groups
from bowline.errors import BowlineError
from bowline.nn import check_ties, load_checkpoint, save_checkpoint
from bowline.nn.tree.sharding import local_part, whole_tensor
from tests.distributed.models import BATCHES, RATE, built, trained
from tests.distributed.process_group import joined

NAMES = ("gpt2", "bert", "t5", "llama", "gemma3")
QUICK = ("gpt2", "gemma3")
"""Those that run on two processes."""


def sharded(name: str, mesh: DeviceMesh) -> Any:
    model = built(name)
    apply_tensor_parallel(model, mesh["tp"])
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh["dp"])
    return model


def rows(mesh: DeviceMesh) -> slice:
    """This process's rows of a batch: processes along `tp` have the same."""
    each = len(BATCHES[0]) // mesh["dp"].size()
    return slice(mesh.get_local_rank("dp") * each, (mesh.get_local_rank("dp") + 1) * each)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)


def mean(losses: list[torch.Tensor], mesh: DeviceMesh) -> list[float]:
    total = torch.stack(losses).double()
    distributed.all_reduce(total, group=mesh["dp"].get_group())
    return list(total / mesh["dp"].size())


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(held).detach().clone() for name, held in model.named_parameters(remove_duplicate=False)}


def run(name: str, mesh: DeviceMesh, out: Path) -> dict[str, Any]:
    model = sharded(name, mesh)
    optimizer = optimizer_of(model)
    losses = mean(trained(model, optimizer, rows(mesh)), mesh)
    parameters = whole(model)
    save_checkpoint(model, out / "saved" / name)
    again = sharded(name, mesh)
    load_checkpoint(again, out / "saved" / name)
    state = TiedState(model, optimizer)
    dcp_save({"state": state}, checkpoint_id=out / "dcp" / name)
    resumed = sharded(name, mesh)
    other = optimizer_of(resumed)
    dcp_load({"state": TiedState(resumed, other)}, checkpoint_id=out / "dcp" / name)
    one, two = (mean(trained(each, by, rows(mesh)), mesh) for each, by in ((model, optimizer), (resumed, other)))
    return {
        "losses": losses,
        "parameters": parameters,
        "holds": bool(check_ties(model)),
        "report": str(check_ties(model)),
        "loaded": all(torch.equal(value, parameters[key]) for key, value in whole(again).items()),
        "resumed": one == two,
        "part": local_part(next(model.parameters())).numel(),
    }


def other_way_round(mesh: DeviceMesh) -> str:
    """Tensor parallelism of a model that is sharded already."""
    model = built("gpt2")
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh["dp"])
    try:
        apply_tensor_parallel(model, mesh["tp"])
    except BowlineError as error:
        return str(error)
    return ""


def main() -> None:
    with joined():
        out, sizes = Path(sys.argv[1]), tuple(int(size) for size in sys.argv[2].split("x"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        place = out / sys.argv[2]
        found: dict[str, Any] = {
            name: run(name, mesh, place) for name in (QUICK if distributed.get_world_size() == 2 else NAMES)
        }
        found["other way round"] = other_way_round(mesh)
        torch.save(found, place / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
