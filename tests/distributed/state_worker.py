"""What each process runs: sharded models loaded from a Hub-style directory, saved into one, and through DCP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import bowline
from bowline.checkpoint import open_checkpoint
from bowline.distributed import TiedState, shard_groups
from bowline.errors import BowlineError
from bowline.nn import check_ties, find_ties, load_checkpoint, save_checkpoint, tie_weights, untie_weights
from bowline.nn.state.mapped_tensors import stored_tensor
from bowline.nn.tree.sharding import spread_like
from tests.distributed.fsdp_worker import mean, said, share, whole
from tests.distributed.models import MODELS, RATE, built, trained
from tests.distributed.process_group import joined

NAMES = ("gpt2", "bert", "t5", "llama")
ROWS, WIDTH = 40_000, 256
"""A table of 41 MB."""


def sharded(name: str, mesh: DeviceMesh, *, on_meta: bool = False) -> nn.Module:
    if on_meta:
        with torch.device("meta"):
            model = MODELS[name]()
        if not find_ties(model).ties:
            tie_weights(model)
    else:
        model = built(name)
    for group in shard_groups(model):
        fully_shard(group, mesh=mesh)
    return model


def loaded(name: str, out: Path, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    for on_meta in (False, True):
        model = sharded(name, mesh, on_meta=on_meta)
        load_checkpoint(model, out / "whole" / name)
        yield {"parameters": whole(model), "holds": bool(check_ties(model))}


def pages_of(file: Path) -> int:
    """Bytes of the mapped file that this process has touched."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def read_bytes(out: Path, mesh: DeviceMesh) -> int:
    """What one process reads of a large table in order to have its rows."""
    held = nn.Linear(WIDTH, ROWS, bias=False, device="meta")
    fully_shard(held, mesh=mesh)
    with open_checkpoint(out / "large") as checkpoint:
        mapped = stored_tensor(checkpoint, checkpoint.tensors["weight"])
        spread_like(mapped, held.weight)
        return pages_of(out / "large" / "model.safetensors")


def saved(out: Path, mesh: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        files = save_checkpoint(sharded(name, mesh), out / "saved" / name, max_shard_size="20KB")
        found[name] = files
    blocked = out / "a file"
    try:
        save_checkpoint(sharded("gpt2", mesh), blocked / "model")
    except (BowlineError, OSError) as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def through_dcp(out: Path, mesh: DeviceMesh, *, saves: bool) -> dict[str, Any]:
    """Ten steps, a checkpoint, and ten more; or the ten more alone, from the checkpoint."""
    found: dict[str, Any] = {}
    for name in ("gpt2", "t5", "llama"):
        model = sharded(name, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        state = TiedState(model, optimizer)
        place = out / "dcp" / name
        if saves:
            trained(model, optimizer, share())
            dcp_save({"state": state}, checkpoint_id=place)
        else:
            dcp_load({"state": state}, checkpoint_id=place)
        found[name] = mean(trained(model, optimizer, share()))
        found[f"{name} holds"] = bool(check_ties(model))
    return found


def untied_into_tied(out: Path, mesh: DeviceMesh) -> dict[str, Any]:
    untied: Any = built("gpt2")
    untied.lm_head.weight = nn.Parameter(torch.zeros(51, 16))
    dcp_save({"state": TiedState(untied)}, checkpoint_id=out / "untied")
    model = sharded("gpt2", mesh)
    before = whole(model)
    try:
        dcp_load({"state": TiedState(model)}, checkpoint_id=out / "untied")
        refused = ""
    except CheckpointException as error:
        refused = str(error)
    after = whole(model)
    return {"refused": refused, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def tied_to_untied_and_back(out: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """A tied model's shards, saved, untied on disk, into an untied model; and that one's, into a tied model again."""
    tied: Any = sharded("gpt2", mesh)
    save_checkpoint(tied, out / "one matrix")
    untied: Any = built("gpt2")
    untie_weights(untied)
    for group in shard_groups(untied):
        fully_shard(group, mesh=mesh)
    found: dict[str, Any] = {"tied": said(lambda: load_checkpoint(untied, out / "one matrix"))}
    if distributed.get_rank() == 0:
        with bowline.open_checkpoint(out / "one matrix") as checkpoint:
            checkpoint.edit().untie().commit(out / "two matrices")
    distributed.barrier()
    load_checkpoint(untied, out / "two matrices")
    found["equal"] = torch.equal(*(whole(untied)[name] for name in ("lm_head.weight", "transformer.wte.weight")))
    with torch.no_grad():
        untied.lm_head.weight.add_(1.0)
    save_checkpoint(untied, out / "apart")
    found["apart"] = said(lambda: load_checkpoint(tied, out / "apart"))
    load_checkpoint(tied, out / "apart", on_conflict="target")
    found["head"] = torch.equal(whole(tied)["transformer.wte.weight"], whole(untied)["lm_head.weight"])
    found["holds"] = bool(check_ties(tied))
    return found


def main() -> None:
    with joined():
        out, part = Path(sys.argv[1]), sys.argv[2]
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        if part == "resume":
            found: dict[str, Any] = {"dcp": through_dcp(out, mesh, saves=False)}
        else:
            found = {"loaded": {name: list(loaded(name, out, mesh)) for name in NAMES}}
            found["read"] = read_bytes(out, mesh)
            found["saved"] = saved(out, mesh)
            found["dcp"] = through_dcp(out, mesh, saves=True)
            found["untied"] = untied_into_tied(out, mesh)
            found["and back"] = tied_to_untied_and_back(out, mesh)
        torch.save(found, out / f"{part}-{distributed.get_world_size()}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
