"""Trains a tied model by FSDP2 and tensor parallelism together, and resumes it from a distributed checkpoint.

    torchrun --nproc-per-node 4 examples/two_dimensions.py --model DIR --mesh 2x2 --checkpoint STEPS --out NEW

The mesh has the dimensions `dp` and `tp`. Along `tp` the processes split each layer and the rows of the tied matrix;
along `dp` they share out the batch and shard what is left by FSDP2. The order matters: split first, then shard.
Started again, with any mesh, the run goes on from the last step in STEPS. The losses are those of one process, if the
model has no dropout.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # imported after the process group starts, it would keep the group alive at exit
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import bowline


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--mesh", default="1x2", help="processes along dp, x, processes along tp")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder for the run's own checkpoints")
    parser.add_argument("--out", required=True, help="where to save the trained checkpoint")
    parser.add_argument("--vocab-size", type=int, help="resize the vocabulary first, to an even or an odd size")
    parser.add_argument("--steps", type=int, default=10, help="the step to end with, resumed steps included")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch, of all processes together")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


def mesh_of(given: argparse.Namespace, device: str) -> DeviceMesh:
    """The mesh (dp, tp) that `--mesh` states."""
    sizes = [int(size) for size in given.mesh.split("x") if size.isdigit()]
    count = distributed.get_world_size()
    if len(sizes) != 2 or sizes[0] * sizes[1] != count:
        raise SystemExit(f"--mesh {given.mesh}: expected dp x tp, such as 1x{count}, of all {count} processes")
    if given.rows % sizes[0]:
        raise SystemExit(f"--rows {given.rows}: expected a multiple of {sizes[0]}, the processes along dp")
    return init_device_mesh(device, (sizes[0], sizes[1]), mesh_dim_names=("dp", "tp"))


def sharded_model(given: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Any:
    """The model, split along tp and then sharded along dp."""
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.to(device).train()
    if given.vocab_size is not None:
        bowline.resize_vocab(model, given.vocab_size)
    bowline.check_before_sharding(model, mesh)
    bowline.apply_tensor_parallel(model, mesh["tp"])
    for group in bowline.shard_groups(model):
        fully_shard(group, mesh=mesh["dp"])
    return model


def steps_done(checkpoint: Path) -> int:
    """The last step that was saved whole: torch writes `.metadata` when all processes have written."""
    return max((int(file.parent.name) for file in checkpoint.glob("*/.metadata")), default=0)


def train(given: argparse.Namespace) -> None:
    """Shards, resumes if there is something to resume, trains and saves the model."""
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    mesh = mesh_of(given, device.type)
    model = sharded_model(given, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, foreach=False)  # built after sharding
    state = bowline.TiedState(model, optimizer)
    done = steps_done(given.checkpoint)
    if done:
        dcp_load({"state": state}, checkpoint_id=given.checkpoint / str(done))
    rank, data_parallel = mesh.get_local_rank("dp"), mesh["dp"].size()
    with bowline.TieGuard(model, optimizer=optimizer, group=distributed.group.WORLD).attach(optimizer):
        for step in range(done + 1, given.steps + 1):
            drawn = torch.Generator().manual_seed(step)  # your own data here
            batch = torch.randint(model.config.vocab_size, (given.rows, given.length), generator=drawn)
            tokens = batch.chunk(data_parallel)[rank].to(device)  # processes along tp get the same rows
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / data_parallel
            distributed.all_reduce(mean, group=mesh["dp"].get_group())
            if distributed.get_rank() == 0:
                print(f"step {step} loss {mean:.7f}", flush=True)
    dcp_save({"state": state}, checkpoint_id=given.checkpoint / str(given.steps))
    bowline.save_checkpoint(model, given.out)  # every process has to call it; the first one writes


if __name__ == "__main__":
    distributed.init_process_group()
    train(options())
    distributed.destroy_process_group()
    os._exit(0)  # torch's caches of DTensors keep gloo's threads, which can abort a normal exit (torch 2.13)
