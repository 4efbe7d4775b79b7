"""What each process runs: models split over the processes by `apply_tensor_parallel`, and by torch alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from bowline.distributed import apply_tensor_parallel, tensor_parallel_plan
from bowline.errors import BowlineError
from bowline.functional.row_shard import is_dtensor
from bowline.nn import check_ties, load_checkpoint, save_checkpoint
from bowline.nn.tree.sharding import local_part
from tests.distributed.models import RATE, TENSOR_PARALLEL, built, trained
from tests.distributed.process_group import joined


def split(name: str, mesh: DeviceMesh, out: Path) -> dict[str, Any]:
    model: Any = built(name)
    loss = apply_tensor_parallel(model, mesh)
    report = check_ties(model)
    losses = [float(value) for value in trained(model, torch.optim.AdamW(model.parameters(), lr=RATE))]
    held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    places = {name: value.placements for name, value in held.items() if is_dtensor(value)}
    save_checkpoint(model, out / "saved" / name)
    again: Any = built(name)
    apply_tensor_parallel(again, mesh)
    load_checkpoint(again, out / "saved" / name)
    return {
        "losses": losses,
        "parameters": {name: _full(value) for name, value in held.items()},
        "split": sorted(name for name in places),
        "report": str(report),
        "holds": bool(report) and bool(check_ties(model)),
        "full logits": loss.status.fallbacks,
        "loaded": all(torch.equal(_full(value), _full(held[name])) for name, value in again.named_parameters()),
    }


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole.detach()


def by_torch_alone(mesh: DeviceMesh) -> dict[str, Any]:
    """`parallelize_module` with a right plan makes two matrices of a tie."""
    model: Any = built("llama")
    parallelize_module(model, mesh, tensor_parallel_plan(model))
    report = check_ties(model)
    with torch.no_grad():
        local_part(model.lm_head.weight).add_(1.0)
    return {"report": str(report), "holds": bool(report), "after": str(check_ties(model))}


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    grid = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("dp", "tp"))
    untied: Any = built("gpt2")
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    for name, model, given in (("grid", built("gpt2"), grid), ("untied", untied, mesh)):
        try:
            apply_tensor_parallel(model, given)
        except BowlineError as error:
            found[name] = str(error)
    return found


def main() -> None:
    with joined():
        out = Path(sys.argv[1])
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        found: dict[str, Any] = {name: split(name, mesh, out) for name in TENSOR_PARALLEL}
        found["torch alone"] = by_torch_alone(mesh)
        found["refusals"] = refusals(mesh)
        torch.save(found, out / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
