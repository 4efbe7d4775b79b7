"""Twenty training steps of transformers' GPT-2 small, as it is and with `use_tied_loss`: losses, time and memory.

The loop is the plain one of `benchmarks.train`. The two models begin with the same weights, see the same batches and
take turns, step by step; the peaks are those of processes of their own, which take three steps.

`python -m benchmarks use_tied_loss` runs all of it; `python -m benchmarks.use_tied_loss WHICH` one process.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measure import machine, median, peak_of_process, reset_peak
from benchmarks.train import BATCH, LEFT_OUT, LENGTH, steps_of_plain_loop, theirs

__all__ = ["VARIANTS", "run"]

VARIANTS = ("as it is", "with use_tied_loss")
STEPS = 20
STEPS_OF_PEAK = 3


def model_of(variant: str) -> Any:
    """The model, with the loss in place where it is to be."""
    from bowline.nn import use_tied_loss

    model = theirs()
    if variant == VARIANTS[1]:
        use_tied_loss(model)
    return model


def peak(variant: str) -> float:
    """Of this process: the most megabytes above what was resident with the model built."""
    model = model_of(variant)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()
    for _ in steps_of_plain_loop(model, STEPS_OF_PEAK, bf16=False):
        pass
    return peak_of_process() - before


def in_turns() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each variant's steps, and their losses."""
    loops: dict[str, Iterator[float]] = {
        variant: steps_of_plain_loop(model_of(variant), STEPS, bf16=False) for variant in VARIANTS
    }
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    losses: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(STEPS):
        for variant, loop in loops.items():
            began = time.perf_counter()
            losses[variant].append(next(loop))
            seconds[variant].append(time.perf_counter() - began)
    return seconds, losses


def run() -> str:
    """All of it, as Markdown."""
    seconds, losses = in_turns()
    took = {variant: median(of[LEFT_OUT:]) for variant, of in seconds.items()}
    peaks = {}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "benchmarks.use_tied_loss", variant]
        peaks[variant] = float(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
        )
    plain = VARIANTS[0]
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses[VARIANTS[1]], losses[plain], strict=True))
    return "\n".join(
        [
            "# transformers' GPT-2 small with the tied loss in place",
            "",
            f"float32, batches of {BATCH} x {LENGTH} tokens, in turns, medians of steps {LEFT_OUT + 1} to {STEPS}; "
            f"{torch.get_num_threads()} threads. Memory: a process's peak above what is resident with the model.",
            "",
            machine(["bowline", "torch", "transformers"]),
            "",
            f"| model | s a step | time | peak MB | memory | loss of step 1 | loss of step {STEPS} |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {variant} | {took[variant]:.2f} | {took[variant] / took[plain]:.2f} | {peaks[variant]:.0f} | "
                f"{peaks[variant] / peaks[plain]:.2f} | {losses[variant][0]:.6f} | {losses[variant][-1]:.6f} |"
                for variant in VARIANTS
            ),
            "",
            f"The losses of a step are at most {apart:.1e} of the loss apart.",
        ]
    )


if __name__ == "__main__":
    print(peak(sys.argv[1]))
