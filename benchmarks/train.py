"""Steps of GPT-2 small: `bowline.train.Trainer`, transformers' `Trainer`, and a plain loop, each in its own process.

All begin with the same weights, without dropout, and see the same batches; their first losses have to agree. AdamW, one
group with weight decay and one without, gradients clipped to 1. The two trainers log the first step and each tenth. The
processes are there together and take turns, step by step, so that what else the machine does falls on all of them.
Memory is the process's peak above what was resident with the model built: gradients, AdamW's moments and what a step
needs.

`python -m benchmarks train` runs all of it; `python -m benchmarks.train CONTENDER DTYPE STEPS` one process, which takes
a step for each line that it reads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.measure import machine, median, peak_of_process, reset_peak

__all__ = ["BATCH", "CONTENDERS", "LEFT_OUT", "LENGTH", "run", "steps_of_plain_loop", "theirs"]

BATCH, LENGTH = 2, 512
STEPS = {"float32": 14, "bf16": 8}
LOG_EVERY = 10
TURN = "done with a step"
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

    settings = TrainerSettings(steps=steps, learning_rate=1e-4, bf16=bf16, log_every=LOG_EVERY)
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
            logging_steps=LOG_EVERY,
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = InOrder(model=model, args=arguments, train_dataset=Dataset(steps), callbacks=[Each()])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def steps_of_plain_loop(
    model: Any, steps: int, bf16: bool, batch_of: Callable[[int], dict[str, torch.Tensor]] = batch
) -> Iterator[float]:
    """nanoGPT's loop: fused AdamW with its two groups, clipping, autocast, gradients set to None. The losses."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch_of(step)).loss
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


def take_turns(name: str, dtype: str, steps: int) -> None:
    """In this process: a line at the end of each step, and the next one when a line comes; at last, what was seen."""
    warnings.simplefilter("ignore")
    build, train = CONTENDERS[name]
    model = build()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()

    def tell() -> None:
        print(TURN, flush=True)
        if not sys.stdin.readline():  # whoever compares is gone
            sys.exit(1)

    losses = train(model, steps, dtype == "bf16", tell)
    print(json.dumps({"peak": peak_of_process() - before, "losses": losses}), flush=True)


class Contender:
    """A process that takes a step when it is told to; its first one has been taken when this is made."""

    def __init__(self, name: str, dtype: str, steps: int) -> None:
        command = [sys.executable, "-m", "benchmarks.train", name, dtype, str(steps)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self._line()

    def step(self) -> None:
        """One more, timed from here."""
        began = time.perf_counter()
        self._go()
        self._line()
        self.seconds.append(time.perf_counter() - began)

    def result(self) -> dict[str, Any]:
        """What the process says at its end."""
        self._go()
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.read().splitlines()[-1])
        return found

    def _go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _line(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == TURN:
                return
        raise RuntimeError(f"a contender ended with exit code {self.process.wait()}")


def table(dtype: str, names: Sequence[str] = tuple(CONTENDERS)) -> str:
    """Markdown of one precision.

    Raises:
        RuntimeError: they do not compute the same loss, so a comparison would say nothing.
    """
    steps = STEPS[dtype]
    contenders = {name: Contender(name, dtype, steps) for name in names}
    for _ in range(steps - 1):
        for contender in contenders.values():
            contender.step()
    results = {name: contender.result() for name, contender in contenders.items()}
    firsts = {name: result["losses"][0] for name, result in results.items()}
    if max(firsts.values()) - min(firsts.values()) > (1e-3 if dtype == "float32" else 0.02):
        raise RuntimeError(f"the first losses differ: {firsts}")
    took = {name: median(contender.seconds[LEFT_OUT - 1 :]) for name, contender in contenders.items()}
    peak = {name: result["peak"] for name, result in results.items()}
    peer = "transformers' Trainer"
    lines = [
        f"## {dtype}: batches of {BATCH} x {LENGTH} tokens",
        "",
        f"| loop | s per step | tokens/s | throughput / {peer} | peak MB | memory / {peer} |",
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
            f"Four processes take turns, step by step. Medians of steps {LEFT_OUT + 1} and later; "
            f"{torch.get_num_threads()} threads. Memory: the process's peak above what is resident with the model.",
            machine(["bowline-ties", "torch", "transformers", "accelerate"]),
            *(table(dtype) for dtype in STEPS),
        ]
    )


if __name__ == "__main__":
    take_turns(sys.argv[1], sys.argv[2], int(sys.argv[3]))
