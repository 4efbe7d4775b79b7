"""Where a step of the `train` benchmark goes: torch's profile of one step of each loop, by kind of operation.

Each loop in its own process, the third step; seconds that the operators spent themselves, on the thread that called
them. What the profile itself costs is in the rest.

`python -m benchmarks train_profile` runs all of it; `python -m benchmarks.train_profile CONTENDER DTYPE` one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections import Counter

from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import machine
from benchmarks.train import BATCH, CONTENDERS, LEFT_OUT, LENGTH, STEPS

__all__ = ["run"]

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkldnn::", "aten::mkldnn", "aten::_addmm"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
    "copies and casts": ("aten::copy_", "aten::clone", "aten::cat"),
    "softmax and loss": ("aten::_log_softmax", "aten::nll_loss", "aten::exp", "aten::logsumexp", "aten::_softmax"),
    "norms and GELU": ("aten::native_layer_norm", "aten::gelu", "aten::tanh", "aten::pow"),
    "AdamW and clipping": ("aten::_fused_adam", "aten::_foreach", "aten::linalg_vector_norm"),
    "filling with 0": ("aten::fill_", "aten::zero_"),
}
"""By the beginning of an operator's name; what begins otherwise is the rest."""


def profiled(name: str, dtype: str) -> dict[str, float]:
    """In this process: seconds of one step by kind, and of the step on the clock."""
    warnings.simplefilter("ignore")
    build, train = CONTENDERS[name]
    ends: list[float] = []
    watching = profile(activities=[ProfilerActivity.CPU])

    def tell() -> None:
        ends.append(time.perf_counter())
        if len(ends) == LEFT_OUT:
            watching.start()
            ends[-1] = time.perf_counter()
        elif len(ends) == LEFT_OUT + 1:
            watching.stop()

    train(build(), LEFT_OUT + 1, dtype == "bf16", tell)
    found: Counter[str] = Counter()
    for event in watching.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        found[kind] += event.self_cpu_time_total / 1e6
    return {**found, "the step": ends[LEFT_OUT] - ends[LEFT_OUT - 1]}


def table(dtype: str) -> str:
    """Markdown of one precision."""
    found = {}
    for name in CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.train_profile", name, dtype]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    kinds = [*KINDS, "the rest", "the step"]
    lines = [f"## {dtype}: s of one step of {BATCH} x {LENGTH} tokens", "", f"| loop | {' | '.join(kinds)} |"]
    lines.append("|---" * (len(kinds) + 1) + "|")
    for name, times in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{times.get(kind, 0):.2f}" for kind in kinds) + " |")
    return "\n".join(lines)


def run() -> str:
    """All of it, as Markdown."""
    return "\n\n".join(
        [
            "# Training GPT-2 small: where a step goes",
            f"One profiled step each, step {LEFT_OUT + 1}: the operators' own time, by kind.",
            machine(["bowline-ties", "torch", "transformers", "accelerate"]),
            *(table(dtype) for dtype in STEPS),
        ]
    )


if __name__ == "__main__":
    print(json.dumps(profiled(sys.argv[1], sys.argv[2])))
