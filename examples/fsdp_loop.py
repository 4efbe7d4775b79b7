"""Fine-tunes a tied causal language model on one process or on several; the losses are the same without dropout.

    torchrun --nproc-per-node 2 examples/fsdp_loop.py --model DIR --text FILE --parallel fsdp --out NEW

DIR is a checkpoint that transformers loads. NEW becomes an ordinary checkpoint, however many processes trained it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # imported after the process group starts, it would keep the group alive at exit
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import bowline


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--text", type=Path, help="the text to train on; without it, token ids are drawn from a seed")
    parser.add_argument("--out", required=True, help="where to save the trained checkpoint")
    parser.add_argument("--parallel", choices=("fsdp", "tp"), default="fsdp", help="how processes split the model")
    parser.add_argument("--vocab-size", type=int, help="resize the vocabulary first, to an even or an odd size")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch, of all processes together")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


def batches(given: argparse.Namespace, vocab_size: int) -> torch.Tensor:
    """A batch for each step (steps, rows, length): the tokens of the text in order, from its start again at its end."""
    count = given.steps * given.rows * given.length
    ids = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    if given.text is not None:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])
        if len(ids) == 0 or int(ids.max()) >= vocab_size:
            raise SystemExit(f"--text {given.text}: expected one token at least, and token ids below {vocab_size}")
    return ids[torch.arange(count) % len(ids)].view(given.steps, given.rows, given.length)


def train(given: argparse.Namespace, rank: int = 0, processes: int = 1) -> None:
    """Loads, shards, trains and saves the model."""
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.to(device).train()
    if given.vocab_size is not None:
        bowline.resize_vocab(model, given.vocab_size)
    data = batches(given, model.config.get_text_config().vocab_size).to(device)
    if processes > 1:
        mesh = init_device_mesh(device.type, (processes,))
        bowline.check_before_sharding(model, mesh)
    if processes > 1 and given.parallel == "tp":
        bowline.apply_tensor_parallel(model, mesh)  # every process gets whole batches
    else:
        if given.rows % processes:
            raise SystemExit(f"--rows {given.rows}: expected a multiple of {processes}, the number of processes")
        data = data.chunk(processes, dim=1)[rank]  # each process gets its own rows
        bowline.use_tied_loss(model)
        for group in bowline.shard_groups(model) if processes > 1 else ():
            fully_shard(group, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, foreach=False)  # built after sharding
    everyone = distributed.group.WORLD if processes > 1 else None
    with bowline.TieGuard(model, optimizer=optimizer, group=everyone).attach(optimizer):
        for step, tokens in enumerate(data, 1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / processes
            if processes > 1:
                distributed.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean:.7f}", flush=True)
    bowline.save_checkpoint(model, given.out)  # every process has to call it; the first one writes
    if rank == 0 and given.text is not None:
        AutoTokenizer.from_pretrained(given.model).save_pretrained(given.out)


if __name__ == "__main__":
    given = options()
    if "WORLD_SIZE" not in os.environ:  # torchrun sets it
        train(given)
    else:
        distributed.init_process_group()
        train(given, distributed.get_rank(), distributed.get_world_size())
        distributed.destroy_process_group()
        os._exit(0)  # torch's caches of DTensors keep gloo's threads, which can abort a normal exit (torch 2.13)
