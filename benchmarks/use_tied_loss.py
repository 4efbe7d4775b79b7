"""Benchmarks twenty training steps of transformers' models with and without `use_tied_loss`.

GPT-2 small, by itself and compiled, and a masked model with a multilingual vocabulary. The loop is the plain one of
`benchmarks.train`. The two models of a case begin with the same weights, see the same batches and take turns, step by
step; the peaks are those of processes of their own, which take three steps: with glibc's allocator as it is, which
keeps much of what is freed, and told to give it back at once.

`python -m benchmarks use_tied_loss` runs all of it, and `benchmarks.adapted_loss` after it;
`python -m benchmarks.use_tied_loss CASE WHICH` one process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import adapted_loss
from benchmarks.measure import machine, median, peak_of_process, reset_peak
from benchmarks.train import BATCH, LEFT_OUT, LENGTH, batch, steps_of_plain_loop, theirs

__all__ = ["CASES", "VARIANTS", "run"]

VARIANTS = ("as it is", "with use_tied_loss")
STEPS = 20
STEPS_OF_PEAK = 3
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
MASKED_BATCH, MASKED_SHARE = (4, 256), 0.15
V = 250002
MULTILINGUAL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 514,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def multilingual() -> Any:
    """An XLM-RoBERTa of a small model's size, as distilled multilingual models have it, drawn with seed 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**MULTILINGUAL))


def masked_batch(step: int) -> dict[str, torch.Tensor]:
    """Random ids; the masked share of them has a label."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, V - 1, MASKED_BATCH, generator=generator)
    masked = torch.rand(MASKED_BATCH, generator=generator) < MASKED_SHARE
    return {"input_ids": ids.masked_fill(masked, V - 1), "labels": ids.masked_fill(~masked, -100)}


@dataclass(frozen=True)
class Case:
    """A model and its batches."""

    title: str
    batches: str
    build: Callable[[], Any]
    batch: Callable[[int], dict[str, torch.Tensor]]
    compiled: bool = False


GPT2_BATCHES = f"batches of {BATCH} x {LENGTH} tokens"
CASES = {
    "gpt2": Case("GPT-2 small", GPT2_BATCHES, theirs, batch),
    "compiled": Case("GPT-2 small under torch.compile", GPT2_BATCHES, theirs, batch, compiled=True),
    "multilingual": Case(
        f"A masked model with {V:,} tokens",
        f"XLM-RoBERTa's class, {MULTILINGUAL['num_hidden_layers']} layers of width {MULTILINGUAL['hidden_size']}, "
        f"batches of {MASKED_BATCH[0]} x {MASKED_BATCH[1]} tokens, {MASKED_SHARE:.0%} of them with a label",
        multilingual,
        masked_batch,
    ),
}


def loop_of(case: Case, variant: str, steps: int) -> Iterator[float]:
    """A generator of the losses of a model's steps; the model is built when this returns."""
    from bowline.nn import use_tied_loss

    model = case.build()
    if variant == VARIANTS[1]:
        use_tied_loss(model)
    call = torch.compile(model) if case.compiled else model
    return steps_of_plain_loop(call, steps, bf16=False, batch_of=case.batch)


def peak(case: Case, variant: str) -> float:
    """The peak of this process, in megabytes above its resident memory after the model was built."""
    loop = loop_of(case, variant, STEPS_OF_PEAK)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()
    for _ in loop:
        pass
    return peak_of_process() - before


def in_turns(case: Case) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each variant's steps, and their losses."""
    loops = {variant: loop_of(case, variant, STEPS) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    losses: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(STEPS):
        for variant, loop in loops.items():
            began = time.perf_counter()
            losses[variant].append(next(loop))
            seconds[variant].append(time.perf_counter() - began)
    return seconds, losses


def peak_of(name: str, variant: str, more: dict[str, str]) -> float:
    """`peak` in a new process, with additional environment variables."""
    command = [sys.executable, "-m", "benchmarks.use_tied_loss", name, variant]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    return float(ran.stdout.split()[-1])


def section(name: str) -> list[str]:
    """A case, as Markdown."""
    case = CASES[name]
    seconds, losses = in_turns(case)
    took = {variant: median(of[LEFT_OUT:]) for variant, of in seconds.items()}
    kept, given_back = ({one: peak_of(name, one, more) for one in VARIANTS} for more in ({}, GIVEN_BACK))
    plain = VARIANTS[0]
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses[VARIANTS[1]], losses[plain], strict=True))
    return [
        f"## {case.title}",
        "",
        f"{case.batches[0].upper()}{case.batches[1:]}.",
        "",
        "| model | s per step | time ratio | peak MB | memory ratio | peak MB, memory given back | memory ratio | "
        f"loss 1 | loss {STEPS} |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {one} | {took[one]:.2f} | {took[one] / took[plain]:.2f} | {kept[one]:.0f} | "
            f"{kept[one] / kept[plain]:.2f} | {given_back[one]:.0f} | {given_back[one] / given_back[plain]:.2f} | "
            f"{losses[one][0]:.6f} | {losses[one][-1]:.6f} |"
            for one in VARIANTS
        ),
        "",
        f"The losses of a step differ by at most {apart:.1e} of the loss.",
        "",
    ]


def run() -> str:
    """Runs all cases; returns Markdown."""
    lines = [
        "# transformers' models with the tied loss in place",
        "",
        f"float32, in turns, medians of steps {LEFT_OUT + 1} to {STEPS}; {torch.get_num_threads()} threads. Memory: a "
        "process's peak above what is resident with the model; given back, with MALLOC_MMAP_THRESHOLD_=65536.",
        "",
        machine(["bowline-ties", "torch", "transformers"]),
        "",
    ]
    return "\n".join([*lines, *(line for name in CASES for line in section(name)), adapted_loss.run()])


if __name__ == "__main__":
    print(peak(CASES[sys.argv[1]], sys.argv[2]))
