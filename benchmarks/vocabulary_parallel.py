"""Benchmarks the loss of a tied matrix whose rows are split over two processes, beside ways that keep logits.

Loss and gradients of hidden states and matrix, on gloo over loopback, one thread a process: Bowline's, which gathers
no logits and keeps none; torch's `loss_parallel`, which keeps each process's part of them; and logits that are gathered
on every process. The ways take turns; a peak is that of one process above what it had before the call.

`python -m benchmarks vocabulary_parallel` runs it; `python -m benchmarks.vocabulary_parallel PLACE` is one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from benchmarks.measure import machine, median, peak_of

__all__ = ["run"]

PROCESSES = 2
POSITIONS, VOCABULARY, WIDTH = 2048, 49152, 576
ROUNDS = 5
BOWLINE, PARALLEL, GATHERED = "bowline", "torch, loss_parallel", "torch, logits gathered"


def process(place: Path) -> None:
    """One process: measures each way and writes seconds, peaks and losses to a file."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    from bowline.functional.loss import chosen_backend, linear_cross_entropy

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    weight: Any = torch.nn.Parameter(distribute_tensor(torch.randn(VOCABULARY, WIDTH) * 0.02, mesh, [Shard(0)]))
    labels = torch.randint(VOCABULARY, (POSITIONS,))

    def logits() -> Any:
        return F.linear(DTensor.from_local(hidden, mesh, [Replicate()], run_check=False), weight)

    def bowline() -> torch.Tensor:
        loss: torch.Tensor = linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        return loss

    def parallel() -> torch.Tensor:
        with loss_parallel():
            loss: Any = F.cross_entropy(logits(), labels)
            loss.backward()
        found: torch.Tensor = loss.full_tensor()
        return found

    def gathered() -> torch.Tensor:
        loss = F.cross_entropy(logits().full_tensor(), labels)
        loss.backward()
        return loss

    def forget() -> None:
        hidden.grad = weight.grad = None

    ways: dict[str, Callable[[], torch.Tensor]] = {BOWLINE: bowline, PARALLEL: parallel, GATHERED: gathered}
    peaks: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    grads: dict[str, torch.Tensor] = {}
    for name, way in ways.items():
        distributed.barrier()
        forget()
        peaks[name] = peak_of(way, forget)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            forget()
            distributed.barrier()
            began = time.perf_counter()
            loss = way()
            distributed.barrier()
            seconds[name].append(time.perf_counter() - began)
            losses[name] = loss.item()
            grads[name] = torch.cat([hidden.grad.flatten(), weight.grad.to_local().flatten()])  # type: ignore[union-attr]
    apart = max(float((grads[name] - grads[BOWLINE]).abs().max()) for name in ways)
    found = {
        "seconds": seconds,
        "peaks": peaks,
        "losses": losses,
        "apart": apart,
        "largest": float(grads[BOWLINE].abs().max()),
        "backend": chosen_backend(hidden, weight),
    }
    (place / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def run() -> str:
    """Runs the processes; returns Markdown."""
    with tempfile.TemporaryDirectory() as place:
        load = machine(["bowline-ties", "torch"])
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}", "--nnodes=1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, "-m", "benchmarks.vocabulary_parallel", place], check=True, env=environment)
        found = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    first = found[0]
    peaks = {name: max(one["peaks"][name] for one in found) for name in first["peaks"]}
    took = {name: median(times) for name, times in first["seconds"].items()}
    whole, part = POSITIONS * VOCABULARY * 4 / 2**20, VOCABULARY // PROCESSES * WIDTH * 4 / 2**20
    return "\n".join(
        [
            "# The loss of a tied matrix that is split by its rows",
            "",
            load,
            "",
            f"{POSITIONS} positions, {VOCABULARY} tokens, width {WIDTH}, float32, {PROCESSES} processes on gloo over "
            f"loopback with one thread each. Loss and gradients; medians of {ROUNDS} rounds in turns. The peak is that "
            "of the process with the higher one, above what it had before the call. All logits would be "
            f"{whole:.0f} MB; the gradient of a process's rows is {part:.0f} MB. Bowline ran {first['backend']!r}.",
            "",
            "| way | peak MB a process | beside bowline | seconds | beside bowline | loss |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {peaks[name]:.0f} | {peaks[name] / peaks[BOWLINE]:.1f} | {took[name]:.2f} | "
                f"{took[name] / took[BOWLINE]:.2f} | {first['losses'][name]:.6f} |"
                for name in took
            ),
            "",
            f"The gradients differ by at most {max(one['apart'] for one in found):.1e}; the largest is "
            f"{max(one['largest'] for one in found):.1e}.",
            "",
        ]
    )


if __name__ == "__main__":
    process(Path(sys.argv[1]))
