"""What each process runs: the check of a copy of a model that FSDP2 shards, as a trainer of RL has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bowline.distributed import apply_tensor_parallel, shard_groups
from bowline.errors import BowlineError
from bowline.nn import check_weight_sync
from tests.distributed.fsdp_worker import share, whole
from tests.distributed.models import BATCHES, built
from tests.distributed.process_group import joined

NAMES = ("gpt2", "bert", "t5", "llama")


def copy_of(name: str) -> nn.Module:
    """The same model in bfloat16, whose head is a parameter of its own."""
    made: Any = built(name).bfloat16()
    head = made.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return made  # type: ignore[no-any-return]


def send(state: dict[str, torch.Tensor], copy: nn.Module, *, heads: bool) -> None:
    head = copy.get_output_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        for name, held in copy.named_parameters(remove_duplicate=False):
            if heads or held is not head:
                held.copy_(state[name])


def said(model: nn.Module, copy: Any) -> str:
    try:
        return str(check_weight_sync(model, copy))
    except BowlineError as error:
        return f"{type(error).__name__}: {error}"


def split(name: str, mesh: DeviceMesh) -> dict[str, str]:
    """A model whose matrix is split by its rows, for tensor parallelism."""
    model: Any = built(name)
    apply_tensor_parallel(model, mesh)
    copy: Any = built(name)
    head = copy.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach() + 1)
    found = {"split, one end": said(model, copy)}
    head.weight.data.copy_(built(name).get_output_embeddings().weight.data)  # type: ignore[operator]
    return {**found, "split, both": said(model, copy)}


def run(name: str, mesh: DeviceMesh) -> dict[str, str]:
    model: Any = built(name)
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy = copy_of(name)
    model(input_ids=BATCHES[0][share()], labels=BATCHES[0][share()]).loss.backward()
    optimizer.step()
    state = whole(model)
    first = distributed.get_rank() == 0
    found = {"before": said(model, copy)}
    send(state, copy, heads=False)
    found["one end"] = said(model, copy)
    found["one end, on the first process"] = said(model, copy if first else None)
    send(state, copy, heads=True)
    found["both"] = said(model, copy)
    found["both, on the first process"] = said(model, copy.state_dict() if first else None)
    found["none"] = said(model, None)
    found["no copy on the first"] = said(model, 3 if first else copy)
    with torch.no_grad():
        model(input_ids=BATCHES[0], labels=BATCHES[0])  # the root stays whole until its backward pass
    found["after a forward pass"] = said(model, copy if first else None)
    return {**found, **split(name, mesh)}


def main() -> None:
    with joined():
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        found = {name: run(name, mesh) for name in NAMES}
        torch.save(found, Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
