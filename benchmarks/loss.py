"""Benchmarks the tied ends of a training step: embedding, an elementwise body, head, loss and backward pass.

Every variant computes the same loss on the same numbers, and they take turns. The floor is three products alone, the
logits, the gradient of hidden and that of the matrix, by `torch.mm`; beside it, the products as Bowline makes them.

For the memory each runs in a process of its own, as in `benchmarks.models`: peak resident memory of one step above the
resident matrix, its gradient included. On a GPU it is what torch's allocator has given out at its peak, above the same,
and they share a process. Where there is a GPU everything runs there. Libraries that are unpacked in `.peers` are found
there.

`python -m benchmarks loss` runs all of it; `python -m benchmarks.loss CASE DTYPE ROUNDS` one case.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from benchmarks.measure import machine, median, peak_of
from bowline.functional.loss import linear_cross_entropy, resources
from bowline.functional.loss.chunks.cpu_matmul import contiguous_in
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.chunks.matmul_choice import products_for
from bowline.functional.loss.resource_limits import current
from bowline.functional.tied_lookup import tied_embedding

__all__ = ["CASES", "Case", "run"]

ROUNDS = 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNPACKED = Path(__file__).parents[1] / ".peers"
PACKAGES = ["bowline-ties", "torch", "triton", "cut-cross-entropy", "liger-kernel", "quack-kernels"]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A vocabulary, a width, and how many tokens there are in a step."""

    name: str
    size: int
    width: int
    rows: int

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The matrix (V, D), and ids and labels (N,), the same every time."""
        here: Any = {"generator": torch.Generator(DEVICE).manual_seed(0), "device": DEVICE}
        weight = (torch.randn(self.size, self.width, **here) * 0.02).to(dtype).requires_grad_()
        ids, labels = (torch.randint(0, self.size, (self.rows,), **here) for _ in range(2))
        return weight, ids, labels


CASES = {
    "gpt2": Case(name="GPT-2 small", size=50257, width=768, rows=2048),
    "t5": Case(name="T5-base", size=32128, width=768, rows=2048),
    "v128k": Case(name="V 128k, D 1024", size=128256, width=1024, rows=1024),
    "llama": Case(name="Llama-3.2-1B", size=128256, width=2048, rows=1024),
    "gemma": Case(name="Gemma-2-2B", size=256000, width=2304, rows=512),
    "qwen": Case(name="Qwen3-0.6B", size=151936, width=1024, rows=1024),
    "small": Case(name="V 128k, small batch", size=128256, width=1024, rows=128),
    "qwen-8k": Case(name="Qwen3-0.6B, 8k tokens", size=151936, width=1024, rows=8192),
    "llama-8k": Case(name="Llama-3.1-8B, 8k tokens", size=128256, width=4096, rows=8192),
    "smoke": Case(name="a try", size=5003, width=64, rows=256),
}
ON_GPU = ("qwen-8k", "llama-8k", "small")
LARGE = list(ON_GPU) if DEVICE == "cuda" else [name for name in CASES if name != "smoke" and "8k" not in name]

# --- what is compared -------------------------------------------------------------------------------------------------


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss as models compute it: logits in float32."""
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def _compiled() -> Loss:
    found: Any = torch.compile(eager)
    return found  # type: ignore[no-any-return]


def _torchs(**options: Any) -> Loss | None:
    function: Any = getattr(F, "linear_cross_entropy", None)
    return function and (lambda hidden, weight, labels: function(hidden, weight, labels, **options))


def _torchs_in_chunks() -> Loss | None:
    options: Any = getattr(nn, "LinearCrossEntropyOptions", None)
    return options and _torchs(options=options())


def _find_peers() -> None:
    """Makes libraries unpacked in `.peers` importable, after those of the environment."""
    for folder in ("triton", "cut-cross-entropy", "liger-kernel", "quack-kernels"):
        if (UNPACKED / folder).is_dir() and str(UNPACKED / folder) not in sys.path:
            sys.path.append(str(UNPACKED / folder))


def _function(module: str, name: str) -> Any:
    """A peer's function; `None` if it is missing or cannot be imported, as cut-cross-entropy without Triton."""
    _find_peers()
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        print(f"{module}: {error}", file=sys.stderr)
        return None


def _cut() -> Loss | None:
    function = _function("cut_cross_entropy", "linear_cross_entropy")
    kind = "cce" if DEVICE == "cuda" else "torch_compile"
    return function and (lambda hidden, weight, labels: function(hidden, weight, labels, impl=kind))


def _liger(**options: Any) -> Loss | None:
    if DEVICE == "cpu":
        return None
    function = _function("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    return function and (lambda hidden, weight, labels: function(hidden, weight, labels, **options))


def _quack() -> Loss | None:
    return None if DEVICE == "cpu" else _function("quack.linear_cross_entropy", "chunked_linear_cross_entropy")


def _ours(backend: str, **allowed: Any) -> Loss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with resources(**allowed):
            found: torch.Tensor = linear_cross_entropy(hidden, weight, labels, backend=backend)
        return found

    return loss


PEERS: dict[str, Callable[[], Loss | None]] = {
    "eager": lambda: eager,
    "torch.compile": _compiled,
    "torch linear_cross_entropy": _torchs,
    "torch linear_cross_entropy, in chunks": _torchs_in_chunks,
    "cut-cross-entropy": _cut,
    "Liger": _liger,
    "Liger, float32 sums": lambda: _liger(accum_dtype=torch.float32),
    "QuACK": _quack,
}
OURS: dict[str, Callable[[], Loss | None]] = {
    "bowline reference": lambda: _ours("reference"),
    "bowline logits": lambda: _ours("logits"),
    "bowline chunked": lambda: _ours("chunked"),
}
if DEVICE == "cpu":
    OURS["bowline chunked, no oneDNN"] = lambda: _ours("chunked", onednn=False)
else:
    OURS["bowline chunked, no compiler"] = lambda: _ours("chunked", compiler=False)
    OURS["bowline chunked, 1 GiB"] = lambda: _ours("chunked", budget=2**30)
    OURS["bowline chunked, 256 MiB"] = lambda: _ours("chunked", budget=2**28)
SLOW = ("torch linear_cross_entropy, in chunks",) if DEVICE == "cpu" else ()
"""Variants measured only once, because they take several times as long as all others."""
FLOORS = ("three products, torch.mm", "three products, transposed, by the faster library")


def step(loss: Loss, lookup: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> Step:
    """One tied step; returns its loss."""
    weight, ids, labels = tensors

    def run() -> torch.Tensor:
        weight.grad = None
        found = loss(torch.tanh(lookup(ids, weight) * 50), weight, labels)
        found.backward()
        return found.detach().float()

    return run


def floor(tensors: tuple[torch.Tensor, ...]) -> Step:
    """The three products alone, by `torch.mm` into existing memory: 512 rows at a time, on a GPU all at once."""
    weight, ids, _ = tensors
    table, rows = weight.detach(), 512 if DEVICE == "cpu" else len(ids)
    gradient = torch.zeros_like(table)
    hidden = torch.tanh(F.embedding(ids, table) * 50)
    room = Products().room(rows, table)

    def run() -> torch.Tensor:
        for some in hidden.split(rows):
            x = room[: len(some)]
            torch.mm(some, table.t(), out=x)
            torch.mm(x, table)
            gradient.addmm_(x.t(), some)
        return torch.zeros(())

    return run


def products_here(tensors: tuple[torch.Tensor, ...]) -> Step:
    """The three products as Bowline computes them on this CPU: transposed, in blocks, by the faster library."""
    weight, ids, _ = tensors
    table, rows, width = weight.detach(), 512, weight.shape[1]
    hidden = torch.tanh(F.embedding(ids, table) * 50)
    by = products_for(hidden, table, current())
    gradient = torch.zeros_like(table)
    parts = [slice(first, first + 2032) for first in range(0, len(table), 2032)]
    room = torch.empty(2032, rows, dtype=by.logits_dtype(hidden))

    def run() -> torch.Tensor:
        for some in hidden.split(rows):
            ready, sums = by.ready(some), torch.zeros(len(some), width)
            for part in parts:
                block = room.view(-1)[: len(table[part]) * len(some)].view(-1, len(some))
                x = by.rounded(by.make_transposed_logits(ready, table[part], block), table.dtype)
                by.add_grad_hidden(sums, x.t(), table[part])
                x = x if x.is_contiguous() else contiguous_in(block, x)
                by.add_block_grad_weight(gradient[part], x, ready, first=False)
        return torch.zeros(())

    return run


def steps(case: Case, dtype: torch.dtype, names: list[str] | None = None) -> dict[str, Step]:
    """The variants that can run here, by name."""
    tensors = case.tensors(dtype)
    found: dict[str, Step] = {}
    for kinds, lookup in ((PEERS, F.embedding), (OURS, tied_embedding)):
        for name, make in kinds.items():
            loss = make() if names is None or name in names else None
            if loss is not None:
                found[name] = step(loss, lookup, tensors)
    for name, make_floor in zip(FLOORS, (floor, products_here), strict=True):
        if (names is None or name in names) and (DEVICE == "cpu" or name == FLOORS[0]):
            found[name] = make_floor(tensors)
    return found


# --- time and memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Medians: seconds of a step, and its ratio to the floor that was timed in the same turn."""

    seconds: float
    floor_ratio: float


def took(case: Case, dtype: torch.dtype, rounds: int = ROUNDS) -> dict[str, Took]:
    """Each variant's medians; they take turns, and the order turns too.

    In its turn each takes the floor and then two steps, of which the second is timed: the memory that it takes is what
    it gave back, as in a loop. A shared machine's pace changes from minute to minute, and its floor with it.

    Raises:
        RuntimeError: one of ours does not compute the same loss, so a comparison would say nothing (a peer's is shown).
    """
    calls = steps(case, dtype)
    lowest = calls.pop(FLOORS[0])
    lowest()
    near = 1e-5 if dtype == torch.float32 else 0.02
    expected = calls["eager"]()
    for name, call in list(calls.items()):  # this also warms up
        try:
            loss = call()
            _wait()
        except Exception as error:  # a peer that does not run here does not end the comparison
            if name not in PEERS:
                raise
            print(f"{name}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            del calls[name]
            continue
        if name not in FLOORS and not torch.isclose(loss, expected, rtol=near):
            said = f"{case.name}: {name} gives {loss.item():.4f}, eager {expected.item():.4f}"
            if name not in PEERS:
                raise RuntimeError(said)
            print(said, file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in calls}
    floors: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for at in range(rounds):
        for name in order:
            if at and name in SLOW:
                continue
            floors[name].append(_seconds(lowest))
            if name not in SLOW:
                calls[name]()
            times[name].append(_seconds(calls[name]))
        order = [*order[1:], order[0]]
    found = {FLOORS[0]: Took(seconds=median([one for many in floors.values() for one in many]), floor_ratio=1.0)}
    for name, many in times.items():
        ratios = [one / floor for one, floor in zip(many, floors[name], strict=True)]
        found[name] = Took(seconds=median(many), floor_ratio=median(ratios))
    return found


def _seconds(call: Step) -> float:
    _wait()
    started = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_megabytes(case: str, dtype: str, name: str) -> float:
    """Peak memory of one step above the resident matrix, on a CPU in a process of its own."""
    if DEVICE == "cuda":
        return _peak_here(CASES[case], DTYPES[dtype], name)
    command = [sys.executable, "-m", "benchmarks.loss", "--peak", case, dtype, name]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def _peak_here(case: Case, dtype: torch.dtype, name: str) -> float:
    tensors = case.tensors(dtype)
    make = (PEERS | OURS)[name]
    loss = make()
    if loss is None:
        return float("nan")
    matrix = tensors[0]

    def forget() -> None:
        matrix.grad = None

    peak = peak_of if DEVICE == "cpu" else _peak_on_gpu
    return peak(step(loss, F.embedding if name in PEERS else tied_embedding, tensors), forget)


def _peak_on_gpu(call: Callable[[], object], forget: Callable[[], object]) -> float:
    """`peak_of` on a GPU, by torch's allocator."""
    call()
    forget()
    gc.collect()
    _wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    _wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _machine() -> str:
    """Versions and machine of the run."""
    _find_peers()
    gpu = f", {torch.cuda.get_device_name()}" if DEVICE == "cuda" else ""
    return machine(PACKAGES) + gpu


def table(name: str, dtype: str, rounds: int = ROUNDS, memory: bool = True) -> str:
    """Markdown of one case: times, ratios to the floor and to the best peer, and peaks."""
    case = CASES[name]
    found = took(case, DTYPES[dtype], rounds)
    gc.collect()
    peer = min(found[other].floor_ratio for other in PEERS if other in found)
    lines = [
        f"## {case.name}, {dtype}: V {case.size}, D {case.width}, N {case.rows}",
        "",
        "| variant | ms | ratio to the floor | ratio to the best peer | peak MiB |",
        "|---|---|---|---|---|",
    ]
    digits = 1 if DEVICE == "cuda" else 0
    for variant, one in found.items():
        peak = f"{peak_megabytes(name, dtype, variant):.0f}" if memory and variant not in FLOORS else ""
        ratios = f"{one.floor_ratio:.2f} | {one.floor_ratio / peer:.2f}"
        lines.append(f"| {variant} | {one.seconds * 1e3:.{digits}f} | {ratios} | {peak} |")
    gradient = case.size * case.width * DTYPES[dtype].itemsize / 2**20
    return "\n".join([*lines, "", f"The gradient of the matrix is {gradient:.0f} MiB."])


def run() -> str:
    """Runs all cases; returns Markdown."""
    return "\n\n".join(
        [
            "# The tied loss: both ends of the vocabulary in a training step",
            f"Medians of {ROUNDS} interleaved rounds. Each variant runs directly after the floor, and its ratio is to "
            f"that run. Each takes two steps, and the second is timed. {torch.get_num_threads()} threads. The floor is "
            f"{FLOORS[0]}. Memory: peak of a step above the resident matrix"
            f"{', each variant in its own process' * (DEVICE == 'cpu')}.",
            _machine(),
            *(table(name, dtype) for name in LARGE for dtype in DTYPES),
        ]
    )


if __name__ == "__main__":
    if sys.argv[1] == "--peak":
        print(_peak_here(CASES[sys.argv[2]], DTYPES[sys.argv[3]], sys.argv[4]))
    else:
        print(_machine())
        print(table(sys.argv[1], sys.argv[2], int(sys.argv[3])))
