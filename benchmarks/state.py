"""Loading and saving a GPT-2-type checkpoint of 1.5 GB, beside transformers and safetensors, in one run.

Each task runs in a process of its own, which imports first and is timed after; anonymous memory is polled from outside
and counted above what the imports left. "Touched" adds one pass over every parameter: mapped pages cost when they are
used, not before. The file is in the page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import machine, median

ROUNDS = 5
MANY_ROUNDS = 15
"""Of what takes milliseconds."""
LAYERS = 26
"""Of width 1024: 1.52 GB in float32."""

PRELUDE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers, safetensors.torch, accelerate
import transformers.models.gpt2.modeling_gpt2
import bowline.nn
from bowline.nn import load_checkpoint, save_checkpoint
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
from transformers import GPT2Config, GPT2LMHeadModel
directory, out = sys.argv[1:3]

def meta():
    config = GPT2Config.from_pretrained(directory)
    with torch.device("meta"):
        return GPT2LMHeadModel(config)

def touch(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.sum()

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1])
"""
USE = "; tensors = model.parameters()"
FILE = "safetensors.torch.load_file(directory + '/model.safetensors')"
LOADS = {
    "transformers `from_pretrained`": "model = GPT2LMHeadModel.from_pretrained(directory)" + USE,
    "bowline, meta model + `load_checkpoint`": "model = meta(); load_checkpoint(model, directory)" + USE,
    "bowline, the same with `mmap=False`": "model = meta(); load_checkpoint(model, directory, mmap=False)" + USE,
    "safetensors `load_file` (no model)": f"tensors = {FILE}.values()",
}
ALONE = {
    "safetensors `load_file`, which fills no model": ("model = meta()", f"tensors = {FILE}.values()"),
    "bowline `load_checkpoint`": ("model = meta()", "load_checkpoint(model, directory)" + USE),
    "`load_file`, then torch's `load_state_dict(assign=True)`, which unties": (
        "model = meta()",
        f"model.load_state_dict({FILE}, assign=True, strict=False)" + USE,
    ),
}
SAVES = {
    "transformers `save_pretrained`": "model.save_pretrained(out)",
    "bowline `save_checkpoint` (synchronised to disk)": "save_checkpoint(model, out)",
    "safetensors `save_file` (no config)": "import os; os.makedirs(out, exist_ok=True); state = model.state_dict(); "
    "state.pop('lm_head.weight'); safetensors.torch.save_file(state, out + '/model.safetensors')",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One task, once."""

    seconds: float
    anonymous_mb: float


def task(before: str, timed: str, *, touched: bool = False) -> str:
    """The program that a process runs. Finding the tensors to touch is not what is timed."""
    return f"""{PRELUDE}
{before}
base, started = anonymous(), time.perf_counter()
{timed}
seconds = time.perf_counter() - started
if {touched}:
    tensors = list(tensors)
    started = time.perf_counter()
    touch(tensors)
    seconds += time.perf_counter() - started
print(json.dumps([seconds, base]), flush=True)
"""


def run_once(program: str, directory: Path, out: Path) -> Run:
    """Time from within, memory from without."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory), str(out)], stdout=subprocess.PIPE, text=True
    )
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            break
        peak = max(peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
        time.sleep(0.002)
    printed = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"a benchmarked program failed:\n{program}")
    seconds, base = json.loads(printed.splitlines()[-1])
    return Run(seconds, max(0.0, (peak - base) / 1024))


def compare(
    tasks: dict[str, str], directory: Path, workspace: Path, rounds: int = ROUNDS
) -> dict[str, tuple[float, float]]:
    """Median seconds and megabytes of each task, rounds interleaved."""
    runs: dict[str, list[Run]] = {name: [] for name in tasks}
    for number in range(rounds):
        for at, (name, program) in enumerate(tasks.items()):
            runs[name].append(run_once(program, directory, workspace / f"out-{number}-{at}"))
            subprocess.run(["rm", "-rf", str(workspace / f"out-{number}-{at}")], check=True)
    return {
        name: (median([one.seconds for one in many]), median([one.anonymous_mb for one in many]))
        for name, many in runs.items()
    }


def table(title: str, results: dict[str, tuple[float, float]], reference: str) -> str:
    """Markdown: each task beside the reference."""
    unit = results[reference]
    lines = [
        f"## {title}",
        "",
        "| task | median s | ratio to the reference | peak anonymous MB |",
        "|---|---|---|---|",
    ]
    for name, (seconds, megabytes) in results.items():
        mark = " (reference)" if name == reference else ""
        lines.append(f"| {name}{mark} | {seconds:.4f} | {seconds / unit[0]:.2f} | {megabytes:.0f} |")
    return "\n".join(lines)


def run() -> str:
    """All of it, as Markdown."""
    with tempfile.TemporaryDirectory() as temporary:
        workspace = Path(temporary)
        directory = workspace / "gpt2"
        build = f"{PRELUDE}\nGPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer={LAYERS}, n_head=16)).save_pretrained(out)"
        subprocess.run([sys.executable, "-c", build, "-", str(directory)], check=True)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e9
        loads = compare({name: task("", code) for name, code in LOADS.items()}, directory, workspace)
        touched = compare({name: task("", code, touched=True) for name, code in LOADS.items()}, directory, workspace)
        alone = compare({name: task(*codes) for name, codes in ALONE.items()}, directory, workspace, MANY_ROUNDS)
        used = compare({name: task(*codes, touched=True) for name, codes in ALONE.items()}, directory, workspace)
        loaded = "model = GPT2LMHeadModel.from_pretrained(directory); touch(model.parameters())"
        saves = compare({name: task(loaded, code) for name, code in SAVES.items()}, directory, workspace)
    first, other = next(iter(LOADS)), next(iter(ALONE))
    what = f"GPT-2-type, {LAYERS} layers of width 1024, {size:.2f} GB, float32, in the page cache"
    return "\n\n".join(
        [
            "# Loading and saving a checkpoint",
            f"{what}; {ROUNDS} interleaved rounds ({MANY_ROUNDS} for cases that time only the loading).",
            machine(["bowline-ties", "torch", "transformers", "safetensors"]),
            table("From a path to a model", loads, first),
            table("From a path to a model, every parameter touched", touched, first),
            table("Into a model that is there (on meta)", alone, other),
            table("Into a model that is there, every parameter touched", used, other),
            table("Saving", saves, next(iter(SAVES))),
        ]
    )
