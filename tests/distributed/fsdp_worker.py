"""What each process runs: models that `fully_shard` shards by `shard_groups`, and in ways that go wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bowline.distributed import PipelineTie, check_before_sharding, shard_groups
from bowline.errors import BowlineError
from bowline.nn import TieGuard, check_ties, tie_weights, untie_weights
from bowline.nn.tree.sharding import local_part
from tests.distributed.models import BATCHES, MODELS, RATE, built, trained
from tests.distributed.process_group import joined

ROWS = 4


def share() -> slice:
    """The rows of each batch that this process has."""
    count = ROWS // distributed.get_world_size()
    return slice(distributed.get_rank() * count, (distributed.get_rank() + 1) * count)


def mean(losses: list[torch.Tensor]) -> list[float]:
    total = torch.stack(losses)
    distributed.all_reduce(total)
    return (total / distributed.get_world_size()).tolist()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters in full, under every name."""
    held: Any = dict(model.named_parameters(remove_duplicate=False))
    return {name: parameter.full_tensor() for name, parameter in held.items()}


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except BowlineError as error:
        return str(error)
    return ""


def by_groups(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    model = built(name)
    check_before_sharding(model, mesh)
    check_before_sharding(model, shard_groups(model))
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    report = check_ties(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with TieGuard(model, optimizer=optimizer, group=distributed.group.WORLD).attach(optimizer):
        losses = mean(trained(model, optimizer, share()))
    return {"losses": losses, "parameters": whole(model), "report": str(report), "holds": bool(report)}


def by_data_parallel(name: str) -> dict[str, Any]:
    model = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    with TieGuard(model, optimizer=optimizer, group=distributed.group.WORLD).attach(optimizer):
        losses = mean(trained(wrapped, optimizer, share()))
    return {"losses": losses, "parameters": {key: value.detach() for key, value in model.state_dict().items()}}


def tied_afterwards(mesh: DeviceMesh) -> dict[str, Any]:
    model: Any = built("llama")
    untie_weights(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    for module in (model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    model.lm_head.weight = model.model.embed_tokens.weight
    report = check_ties(model, [("lm_head.weight", "model.embed_tokens.weight")])
    losses = mean(trained(model, torch.optim.AdamW(model.parameters(), lr=RATE), share()))
    return {"losses": losses, "report": str(report), "holds": bool(report)}


def wrapped_apart(mesh: DeviceMesh) -> dict[str, Any]:
    model: Any = built("llama")
    separate = [model.model.embed_tokens, model.lm_head, model]
    refused = said(lambda: check_before_sharding(model, separate))
    for module in separate:
        fully_shard(module, mesh=mesh)
    try:
        model(input_ids=BATCHES[0], labels=BATCHES[0])
        plain = ""
    except (ValueError, RuntimeError, AssertionError) as error:
        plain = f"{type(error).__name__}: {error}"
    return {"refused": refused, "plain": plain}


def by_transformers(out: Path) -> dict[str, Any]:
    """transformers' own FSDP2, of a tied model whose rows do not divide by the processes."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    place = out / "llama"
    if distributed.get_rank() == 0:
        built("llama").save_pretrained(place)  # type: ignore[operator]
    distributed.barrier()
    config = DistributedConfig(fsdp_size=distributed.get_world_size())
    refused = said(lambda: check_before_sharding(built("llama"), config))
    model: Any = transformers.LlamaForCausalLM.from_pretrained(place, distributed_config=config)
    report = check_ties(model)
    losses = mean(trained(model, torch.optim.AdamW(model.parameters(), lr=RATE), share()))
    return {"losses": losses, "refused": refused, "report": str(report), "holds": bool(report)}


def stages_of_transformers(out: Path) -> dict[str, Any]:
    """transformers' own pipeline: each stage takes one step on its copy, which has a gradient of its own."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(pp_size=distributed.get_world_size())
    found: dict[str, Any] = {"refused": said(lambda: check_before_sharding(built("llama"), config))}
    for case in ("alone", "tied"):
        model: Any = transformers.LlamaForCausalLM.from_pretrained(out / "llama", distributed_config=config)
        table = model.model.embed_tokens.weight
        tie = PipelineTie(model, "model.embed_tokens.weight", distributed.group.WORLD) if case == "tied" else None
        found["loss"] = model(input_ids=BATCHES[0], labels=BATCHES[0]).loss
        (table[1 + distributed.get_rank() :] ** 2).sum().backward()
        if tie is not None:
            tie.reduce_gradients()
        torch.optim.SGD([table], lr=0.1).step()
        found[case] = table.detach().clone()
    return found


def an_alias(mesh: DeviceMesh) -> dict[str, Any]:
    model: Any = built("gpt2")
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach())
    refused = said(lambda: check_before_sharding(model, mesh))
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    trained(model, torch.optim.AdamW(model.parameters(), lr=RATE), share())
    full = whole(model)
    apart = (full["lm_head.weight"] - full["transformer.wte.weight"]).abs().max()
    return {"refused": refused, "apart": float(apart), "report": str(check_ties(model))}


def an_early_optimizer(mesh: DeviceMesh) -> dict[str, Any]:
    model = built("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    refused = said(lambda: check_before_sharding(model, mesh, optimizer))
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    before = whole(model)
    trained(model, optimizer, share())
    after = whole(model)
    return {
        "refused": refused,
        "still": all(torch.equal(before[name], after[name]) for name in before),
        "now": said(lambda: check_before_sharding(model, mesh, optimizer)),
    }


def disagreements() -> dict[str, Any]:
    rank = distributed.get_rank()
    untied = built("gpt2")
    if rank == 1:
        untie_weights(untied)
    shapes: Any = built("gpt2")
    if rank == 1:
        table = nn.Embedding(49, 16)
        shapes.transformer.wte, shapes.lm_head = table, nn.Linear(16, 49, bias=False)
        tie_weights(shapes, [("lm_head.weight", "transformer.wte.weight")], on_conflict="source")
    one_sided: Any = built("gpt2")
    if rank == 1:
        one_sided.lm_head.weight = nn.Parameter(one_sided.lm_head.weight.detach().clone())
    return {
        "untied": said(lambda: check_before_sharding(untied)),
        "shapes": said(lambda: check_before_sharding(shapes)),
        "one sided": said(lambda: check_before_sharding(one_sided)),
    }


def guards() -> dict[str, Any]:
    """A replica that drifts on one process, and a tie that breaks on one."""
    world = distributed.group.WORLD
    drifted: Any = built("gpt2")
    guard = TieGuard(drifted, group=world)
    guard.check()
    with torch.no_grad():
        drifted.lm_head.weight[3, 5] += 1e-6 * distributed.get_rank()
    broken: Any = built("gpt2")
    other = TieGuard(broken, group=world)
    if distributed.get_rank() == 1:
        broken.lm_head = nn.Linear(16, 51, bias=False)
    return {"drifted": said(guard.check), "broken": said(other.check)}


def main() -> None:
    with joined():
        out = Path(sys.argv[1])
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        found: dict[str, Any] = {"fsdp": {name: by_groups(name, mesh) for name in MODELS}}
        found["ddp"] = {name: by_data_parallel(name) for name in ("gpt2", "bert", "t5")}
        found["tied afterwards"] = tied_afterwards(mesh)
        found["wrapped apart"] = wrapped_apart(mesh)
        found["transformers"] = by_transformers(out)
        found["stages"] = stages_of_transformers(out)
        found["alias"] = an_alias(mesh)
        found["early optimizer"] = an_early_optimizer(mesh)
        found["disagreements"] = disagreements()
        found["guards"] = guards()
        found["local"] = {"rows": len(local_part(fully_sharded_table(mesh)))}
        torch.save(found, out / f"{os.environ['RANK']}.pt")


def fully_sharded_table(mesh: DeviceMesh) -> torch.Tensor:
    model: Any = built("gpt2")
    fully_shard(model, mesh=mesh)
    table: torch.Tensor = model.lm_head.weight
    return table


if __name__ == "__main__":
    main()
