"""Fine-tunes a tied causal language model by transformers' Trainer with accelerate's FSDP2; a TieGuard watches the tie.

    torchrun --nproc-per-node 2 examples/accelerate_trainer.py --model DIR --out NEW

accelerate 1.15 shards the ends of a tie as one parameter, for odd vocabularies too. Without torchrun the same lines
train on one process, with the same losses if the model has no dropout.

On a CPU accelerate ignores `fsdp=True` without a word and takes DDP. `OnAnyDevice` below turns FSDP2 on there; leave it
out where all processes have a GPU. Sharding the model before the Trainer gets it is not possible: accelerate does not
find the layers' classes in a model that is sharded already.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed.nn  # imported after the process group starts, it would keep the group alive at exit
from accelerate import FullyShardedDataParallelPlugin, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import distributed
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import bowline


class OnAnyDevice(Trainer):
    """A Trainer whose `fsdp=True` is FSDP2 on a CPU too."""

    def create_accelerator_and_postprocess(self) -> None:
        """Enters FSDP2 into accelerate's state, as accelerate itself does for GPUs alone."""
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if self.args.fsdp_plugin_args is not None and state.distributed_type == DistributedType.MULTI_CPU:
            PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--out", required=True, help="where to save the trained checkpoint")
    parser.add_argument("--vocab-size", type=int, help="resize the vocabulary first, to an even or an odd size")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch, of all processes together")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


def settings(given: argparse.Namespace, processes: int) -> TrainingArguments:
    """The Trainer's: FSDP2 on several processes, batches in the order of the data."""
    if given.rows % processes:
        raise SystemExit(f"--rows {given.rows}: expected a multiple of {processes}, the number of processes")
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if processes > 1 else {}
    return TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.rows // processes,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **sharding,
    )


def train(given: argparse.Namespace) -> None:
    """Loads, trains and saves the model."""
    arguments = settings(given, int(os.environ.get("WORLD_SIZE", "1")))
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    if given.vocab_size is not None:
        bowline.resize_vocab(model, given.vocab_size)
    bowline.check_before_sharding(model)  # the tie holds, and every process has the same
    drawn = torch.Generator().manual_seed(0)  # your own data here
    rows = torch.randint(model.config.vocab_size, (given.steps * given.rows, given.length), generator=drawn)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    guard: Any = bowline.TieGuard(model)
    trainer = OnAnyDevice(model=model, args=arguments, train_dataset=data, callbacks=[guard])
    trainer.train()
    trained: Any = trainer.model
    report = bowline.check_ties(trained)
    report.raise_if_broken()
    bowline.save_checkpoint(trained, given.out)  # every process has to call it; the first one writes
    if arguments.process_index == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} loss {entry['loss']:.7f}", flush=True)
        print(f"{type(trained).__name__} after {guard.steps} guarded steps: {report}", flush=True)


if __name__ == "__main__":
    train(options())
    if distributed.is_initialized():
        distributed.destroy_process_group()
        os._exit(0)  # torch's caches of DTensors keep gloo's threads, which can abort a normal exit (torch 2.13)
