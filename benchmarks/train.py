"""Steps of GPT-2 small: `bowline.train.Trainer`, transformers' `Trainer`, and a plain loop, each in its own process.

All begin with the same weights, without dropout, and see the same batches; their first losses have to agree. AdamW, one
group with weight decay and one without, gradients clipped to 1. A step's time is from the end of one step to that of
the next; memory is the process's peak above what was resident with the model built: gradients, AdamW's moments and what
a step needs. The processes take turns.

`python -m benchmarks train` runs all of it; `python -m benchmarks.train CONTENDER DTYPE STEPS` one process.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.measure import machine, median, peak_of_process, reset_peak

__all__ = ["BATCH", "CONTENDERS", "LEFT_OUT", "LENGTH", "run", "steps_of_plain_loop", "theirs"]

BATCH, LENGTH = 2, 512
STEPS = {"float32": 6, "bf16": 4}
ROUNDS = 3
LEFT_OUT = 2
"""The first steps: AdamW makes its moments in them."""
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def batch(step: int) -> dict[str, torch.Tensor]:
    """Tokens and labels (2, 512) of a step; no label where none is predicted, which transformers' Trainer counts."""
    ids = torch.randint(0, 50257, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def theirs() -> Any:
    """GPT-2 small of transformers, drawn with seed 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**NO_DROPOUT))


def ours() -> Any:
    """The same weights in the class here."""
    from bowline.models import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**NO_DROPOUT))
    model.load_state_dict(theirs().state_dict())
    return model


class Batches:
    """The batches as `bowline.train` asks for them."""

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        return batch(step)

    def held_out(self) -> list[dict[str, torch.Tensor]]:
        return []


class Dataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The batches as transformers' `Trainer` asks for them, row by row, in order."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * BATCH

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {name: tensor[at % BATCH] for name, tensor in batch(at // BATCH).items()}


# --- the contenders ---------------------------------------------------------------------------------------------------

Tell = Callable[[], None]


def bowlines(model: Any, steps: int, bf16: bool, tell: Tell) -> list[float]:
    """`bowline.train.Trainer`."""
    from bowline.train import Trainer, TrainerSettings

    settings = TrainerSettings(steps=steps, learning_rate=1e-4, bf16=bf16, log_every=1)
    result = Trainer(model, Batches(), settings, on_step=lambda _: tell()).train()
    return [record["loss"] for record in result.history]


def transformers_trainer(model: Any, steps: int, bf16: bool, tell: Tell) -> list[float]:
    """transformers' `Trainer` as it comes, reporting to nobody; its batches are not shuffled."""
    import transformers

    class Each(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            tell()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(Dataset(steps))

    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=bf16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = InOrder(model=model, args=arguments, train_dataset=Dataset(steps), callbacks=[Each()])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def steps_of_plain_loop(model: Any, steps: int, bf16: bool) -> Iterator[float]:
    """nanoGPT's loop: fused AdamW with its two groups, clipping, autocast, gradients set to None. The losses."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def plain_loop(model: Any, steps: int, bf16: bool, tell: Tell) -> list[float]:
    """`steps_of_plain_loop` to its end."""
    losses = []
    for loss in steps_of_plain_loop(model, steps, bf16):
        losses.append(loss)
        tell()
    return losses


CONTENDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, int, bool, Tell], list[float]]]] = {
    "bowline.train.Trainer": (ours, bowlines),
    "transformers' Trainer": (theirs, transformers_trainer),
    "plain loop, transformers' model": (theirs, plain_loop),
    "plain loop, bowline's model": (ours, plain_loop),
}

# --- time and memory --------------------------------------------------------------------------------------------------


def measured(name: str, dtype: str, steps: int) -> dict[str, Any]:
    """In this process: seconds of each step, the peak in MB, and the losses."""
    warnings.simplefilter("ignore")
    build, train = CONTENDERS[name]
    model = build()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()
    ends: list[float] = []
    losses = train(model, steps, dtype == "bf16", lambda: ends.append(time.perf_counter()))
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return {"seconds": seconds[LEFT_OUT - 1 :], "peak": peak_of_process() - before, "losses": losses}


def table(dtype: str) -> str:
    """Markdown of one precision.

    Raises:
        RuntimeError: they do not compute the same loss, so a comparison would say nothing.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, results in found.items():
            command = [sys.executable, "-m", "benchmarks.train", name, dtype, str(STEPS[dtype])]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            firsts = {name: results[0]["losses"][0] for name, results in found.items() if results}
            if max(firsts.values()) - min(firsts.values()) > (1e-3 if dtype == "float32" else 0.02):
                raise RuntimeError(f"the first losses differ: {firsts}")
    took = {name: median([s for result in results for s in result["seconds"]]) for name, results in found.items()}
    peak = {name: median([result["peak"] for result in results]) for name, results in found.items()}
    peer = "transformers' Trainer"
    lines = [
        f"## {dtype}: batches of {BATCH} x {LENGTH} tokens",
        "",
        f"| loop | s a step | tokens/s | throughput, of {peer} | peak MB | memory, of {peer} |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in took.items():
        lines.append(
            f"| {name} | {seconds:.2f} | {BATCH * LENGTH / seconds:.0f} | {took[peer] / seconds:.2f} | "
            f"{peak[name]:.0f} | {peak[name] / peak[peer]:.2f} |"
        )
    return "\n".join(lines)


def run() -> str:
    """All of it, as Markdown."""
    return "\n\n".join(
        [
            "# Training GPT-2 small: steps of a loop",
            f"Medians over {ROUNDS} interleaved processes each, of steps {LEFT_OUT + 1} and later; "
            f"{torch.get_num_threads()} threads. Memory: the process's peak above what is resident with the model.",
            machine(["bowline", "torch", "transformers", "accelerate"]),
            *(table(dtype) for dtype in STEPS),
        ]
    )


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
